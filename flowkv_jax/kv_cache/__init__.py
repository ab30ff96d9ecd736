"""The KV cache of one node: which block holds what (pure host code), and the pool itself.

`SegmentAllocator` hands out block ids, `PrefixCache` knows what cached blocks contain,
`KVCacheManager` joins the two into block tables. None of the three imports JAX, so import them
from their modules: this package pulls nothing in.
"""
