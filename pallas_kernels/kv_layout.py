"""Axis order, shape and size of the KV pool: the only place that spells them. Imports no JAX.

One array holds a node's whole cache, block-major (FlowKV, Eq. 5: (L, 2, B, H) -> (B, L, 2, H); the
paper's B is our P, its H is our Z*K*H):

    kv_PL2ZKH[block, layer, 0 for keys | 1 for values, token in block, KV head, head dim]

All bytes of a block are contiguous, so any interval of block ids is one contiguous piece of memory.
That is what lets a whole prompt's cache move in one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

POOL_AXES = "PL2ZKH"
LAYER_MAJOR_AXES = "L2PZKH"
"""The order FlowKV starts from. Nothing is served in it; kernels take it to be measured against."""
KEY, VALUE = 0, 1
LARGEST_INDEX = 2**31 - 1
"""Of an int32, which is what JAX computes indices in."""


_HALF_FLOATS = ("bfloat16", "float16")


def storage_dtype(dtype: str, platform: str) -> str:
    """What the pool's elements are stored as: on CPU, the bits of 16-bit floats.

    XLA on CPU has no 16-bit floating-point gather or scatter; it would widen the whole pool to
    float32 and narrow it again in every layer. Bits it moves as they are, and the kernels give only
    what they have gathered its type back.
    """
    return "uint16" if platform == "cpu" and dtype in _HALF_FLOATS else dtype


def pool_index(
    axes: str,
    *,
    block: Any = None,
    layer: Any = None,
    half: Any = None,
    token: Any = None,
    kv_head: Any = None,
    head_dim: Any = None,
) -> tuple[Any, ...]:
    """Coordinates in the order of `axes`, all or some of the pool's; `half` is KEY or VALUE."""
    by_axis = {"P": block, "L": layer, "2": half, "Z": token, "K": kv_head, "H": head_dim}
    return tuple(by_axis[axis] for axis in axes)


def flat_index(shape: Sequence[int], coordinates: Sequence[Any]) -> Any:
    """Row number of coordinates in an array of `shape`, row-major; ints or arrays of them.

    It is below the product of the extents. Callers that compute in 32 bits check that product
    against `LARGEST_INDEX` first.
    """
    index = 0
    for extent, coordinate in zip(shape, coordinates, strict=True):
        index = index * extent + coordinate
    return index


@dataclass(frozen=True)
class KVLayout:
    """Shape of one block.

    Attributes:
        num_layers: L.
        block_size: Z, tokens in a block.
        num_kv_heads: K, of the whole model (not of one tensor-parallel shard).
        head_dim: H.
        dtype: NumPy/ml_dtypes name, such as "float32" or "bfloat16".
        dtype_bytes: size of one element.
    """

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    dtype_bytes: int

    def __post_init__(self) -> None:
        for name in ("num_layers", "block_size", "num_kv_heads", "head_dim", "dtype_bytes"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")

    def pool_shape(self, num_blocks: int) -> tuple[int, int, int, int, int, int]:
        """Shape of `kv_PL2ZKH` for `num_blocks` blocks."""
        return (
            num_blocks,
            self.num_layers,
            2,
            self.block_size,
            self.num_kv_heads,
            self.head_dim,
        )

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token, all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.dtype_bytes

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)
