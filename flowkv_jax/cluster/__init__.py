"""Several nodes as one server: who drives them, and how they are reached. No JAX."""
