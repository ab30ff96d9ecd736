"""Decides which nodes serve a request, which role each node has, how many there are. No JAX."""
