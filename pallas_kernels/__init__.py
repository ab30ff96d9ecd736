"""Kernels over the block-major KV pool. Imports no other package of the project.

Dimension key, used as suffixes of array names throughout the project; einsums use the same letters:

    B sequences in a batch      R rows of a prefill batch (a row is a tile of one prompt)
    T query tokens of a row     S cached tokens             M blocks per sequence (table width)
    P blocks in the pool        Z tokens in a block         L layers
    N query heads               K KV heads                  G = N / K
    H head dim                  D model dim                 F feed-forward dim     V vocabulary
    a literal 2 is key/value

The pool is `kv_PL2ZKH`; a run to send is `kv_PL2ZKH[start : start + num_blocks]`. The FlowKV
paper's B is our P, its H is our Z*K*H.
"""
