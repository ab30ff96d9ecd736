"""One process that holds a node of a cluster."""
