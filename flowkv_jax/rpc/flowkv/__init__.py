"""Protos of the gRPC front door, and what the compiler makes of them."""
