"""Benchmarks that run by themselves: `python -m benchmarks.NAME --help`."""
