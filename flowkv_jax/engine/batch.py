"""From scheduled sequences to padded arrays: which compiled shapes a step uses, and their contents.

The device sees few shapes. Decode has a row a sequence; the number of rows is padded to a power of
two. Prefill cuts chunks into tiles of T tokens, a row a tile, for the T that pads least; a step
with many tiles becomes several batches. Context length is no shape: block tables are always M wide.

Pure NumPy. Arrays are made new for every step, for the device may read them in place, later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from flowkv_jax.engine.step import ScheduledSequence

IntArray = npt.NDArray[np.int32]

PREFILL_ROWS: Mapping[int, tuple[int, ...]] = {
    16: (1, 2, 8, 32),
    64: (1, 2, 4, 8, 16),
    256: (1, 2, 4),
}
"""Tile size T -> the row counts R that are compiled for it."""

_FROM_DEVICE = -1
"""In place of a token id: take the token the previous step sampled, which the host has not read."""


@dataclass(frozen=True)
class Batch:
    """Arrays of one forward pass, and who is in its rows.

    Attributes:
        tokens_RT: int32; `_FROM_DEVICE` where the token is only on the device.
        q_starts_R, kv_lens_R, block_tables_RM: see `models.llama.StepInputs`.
        source_slots_R: int32, where in the previous step's sampled tokens to look; 0 if nowhere.
        offsets_R: int32, index in the row of its last real token.
        target_slots_R: int32, where this step's sampled token goes; past the end for no token.
        tiles: (row, sequence, first position, number of tokens) of every row that is not padding.
        sampling: (row, index in `ScheduledStep.sampling`) of every row that yields a token.
    """

    tokens_RT: IntArray
    q_starts_R: IntArray
    kv_lens_R: IntArray
    block_tables_RM: IntArray
    source_slots_R: IntArray
    offsets_R: IntArray
    target_slots_R: IntArray
    tiles: tuple[tuple[int, ScheduledSequence, int, int], ...]
    sampling: tuple[tuple[int, int], ...]

    @property
    def shape(self) -> tuple[int, int]:
        """(R, T)."""
        rows, tokens = self.tokens_RT.shape
        return rows, tokens


def row_buckets(max_rows: int) -> tuple[int, ...]:
    """Powers of two up to the first that holds `max_rows`."""
    buckets = [1]
    while buckets[-1] < max_rows:
        buckets.append(2 * buckets[-1])
    return tuple(buckets)


class BatchBuilder:
    """Builds the batches of one step after the other.

    Args:
        max_num_seqs: most sequences decoded in a step.
        table_width: M, blocks of the longest possible sequence.
        block_table: request id -> block ids, int32[n].
    """

    def __init__(
        self, max_num_seqs: int, table_width: int, block_table: Callable[[str], IntArray]
    ) -> None:
        self.decode_rows = row_buckets(max_num_seqs)
        self.num_slots = self.decode_rows[-1]
        self._table_width = table_width
        self._block_table = block_table

    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Every (R, T) a step may use, the likeliest first."""
        prefill = [(rows, tile) for tile, counts in PREFILL_ROWS.items() for rows in counts]
        return (*((rows, 1) for rows in self.decode_rows), *prefill)

    def decode(
        self,
        decodes: Sequence[ScheduledSequence],
        first_sampling: int,
        slot_of: Mapping[str, int],
    ) -> Batch:
        """The batch of a step's decodes.

        Args:
            first_sampling: index in `ScheduledStep.sampling` of the first of them.
            slot_of: request id -> slot of its token in the previous step.
        """
        count = len(decodes)
        rows = next(bucket for bucket in self.decode_rows if bucket >= count)
        batch = self.padding((rows, 1))
        tokens, starts, sources = [], [], []
        tables, block_table = batch.block_tables_RM, self._block_table
        for row, (request, start, _, _) in enumerate(decodes):
            known = request.token_ids
            is_known = start < len(known)
            tokens.append(known[start] if is_known else _FROM_DEVICE)
            sources.append(0 if is_known else slot_of[request.request_id])
            starts.append(start)
            table = block_table(request.request_id)
            tables[row, : table.size] = table
        batch.tokens_RT[:count, 0] = tokens
        batch.source_slots_R[:count] = sources
        batch.q_starts_R[:count] = starts
        batch.kv_lens_R[:count] = batch.q_starts_R[:count] + 1
        batch.target_slots_R[:count] = range(first_sampling, first_sampling + count)
        return replace(
            batch,
            tiles=tuple((row, sequence, sequence.start, 1) for row, sequence in enumerate(decodes)),
            sampling=tuple((row, first_sampling + row) for row in range(count)),
        )

    def prefill(self, prefills: Sequence[ScheduledSequence]) -> Iterator[Batch]:
        """The batches of a step's prompt chunks, in an order in which earlier tiles come first."""
        if not prefills:
            return
        tile = _best_tile([sequence.num_tokens for sequence in prefills])
        tiles = []
        num_sampling = 0
        for sequence in prefills:
            end = sequence.start + sequence.num_tokens
            for start in range(sequence.start, end, tile):
                size = min(tile, end - start)
                samples = sequence.samples and start + size == end
                tiles.append((sequence, start, size, num_sampling if samples else None))
            num_sampling += sequence.samples
        done = 0
        for rows in _split_rows(len(tiles), PREFILL_ROWS[tile]):
            yield self._prefill_batch(rows, tile, tiles[done : done + rows])
            done += rows

    def _prefill_batch(
        self,
        rows: int,
        tile: int,
        members: Sequence[tuple[ScheduledSequence, int, int, int | None]],
    ) -> Batch:
        batch = self.padding((rows, tile))
        sampling = []
        for row, (sequence, start, size, sampling_index) in enumerate(members):
            request = sequence.request
            batch.tokens_RT[row, :size] = request.token_ids[start : start + size]
            batch.q_starts_R[row] = start
            batch.kv_lens_R[row] = start + size
            table = self._block_table(request.request_id)
            batch.block_tables_RM[row, : table.size] = table
            batch.offsets_R[row] = size - 1
            if sampling_index is not None:
                batch.target_slots_R[row] = sampling_index
                sampling.append((row, sampling_index))
        return replace(
            batch,
            tiles=tuple((row, *member[:3]) for row, member in enumerate(members)),
            sampling=tuple(sampling),
        )

    def padding(self, shape: tuple[int, int]) -> Batch:
        """A batch of padding alone: what others are filled into, and what shapes compile with."""
        rows, tokens = shape
        return Batch(
            tokens_RT=np.zeros((rows, tokens), np.int32),
            q_starts_R=np.zeros(rows, np.int32),
            kv_lens_R=np.zeros(rows, np.int32),
            block_tables_RM=np.zeros((rows, self._table_width), np.int32),
            source_slots_R=np.zeros(rows, np.int32),
            offsets_R=np.zeros(rows, np.int32),
            target_slots_R=np.full(rows, self.num_slots, np.int32),
            tiles=(),
            sampling=(),
        )


def _best_tile(lengths: Sequence[int]) -> int:
    """The tile size that computes fewest padded tokens; the larger one on a tie."""

    def padded_tokens(tile: int) -> int:
        num_tiles = sum(-(-length // tile) for length in lengths)
        return tile * sum(_split_rows(num_tiles, PREFILL_ROWS[tile]))

    return min(sorted(PREFILL_ROWS, reverse=True), key=padded_tokens)


def _split_rows(num_tiles: int, counts: Sequence[int]) -> list[int]:
    """Rows of the batches that hold `num_tiles` tiles: full ones, then the smallest that fits."""
    batches = [counts[-1]] * (num_tiles // counts[-1])
    rest = num_tiles % counts[-1]
    if rest:
        batches.append(next(count for count in counts if count >= rest))
    return batches
