"""Attention over the block-major pool: one operation, several implementations."""

from pallas_kernels.paged_attention.api import IMPLEMENTATIONS, paged_attention

__all__ = ["IMPLEMENTATIONS", "paged_attention"]
