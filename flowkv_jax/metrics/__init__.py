"""What a running engine tells of itself: Prometheus metrics, dashboards, traces. No JAX."""
