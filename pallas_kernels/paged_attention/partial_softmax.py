"""Attention over shares of a context, put together (flash-decoding)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

MASKED = -1e30
"""Score of what is not seen: finite, so that a row of nothing gives no NaN."""

_PROGRAMS = 264
"""Programs wanted in flight: two for each of an H100's or H200's 132 multiprocessors."""
_LEAST_SPLIT_TOKENS = 256
_MAX_SPLITS = 32


def choose_splits(num_programs: int, most_tokens: int) -> int:
    """Shares of each row's context: enough for `_PROGRAMS` programs, none below a few tiles.

    Args:
        num_programs: programs without a split, rows times KV heads.
        most_tokens: the longest context the block tables can hold.
    """
    wanted = -(-_PROGRAMS // max(1, num_programs))
    return max(1, min(wanted, most_tokens // _LEAST_SPLIT_TOKENS, _MAX_SPLITS))


def merge(out_RSNH: jax.Array, peak_RSN: jax.Array, total_RSN: jax.Array) -> jax.Array:
    """Attention over a whole context from S shares of it.

    Args:
        out_RSNH: values summed under the weights 2 ** (score - peak), not normalised.
        peak_RSN: largest score of a share, in base 2; `MASKED` for an empty one.
        total_RSN: sum of the weights of a share; 0 for an empty one.

    Returns:
        float32[R, N, H]; zero where all shares are empty.
    """
    weight_RSN = jnp.exp2(peak_RSN - jnp.max(peak_RSN, axis=1, keepdims=True))
    total_RN = jnp.sum(total_RSN * weight_RSN, axis=1)
    out_RNH = jnp.sum(out_RSNH * weight_RSN[..., None], axis=1)
    return out_RNH / jnp.where(total_RN > 0, total_RN, 1.0)[..., None]
