"""Moves a sequence from its prefill node to its decode node. No JAX."""
