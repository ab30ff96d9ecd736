"""Padded batches: every token of a step is in exactly one row, in the right place."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowkv_jax.engine.batch import PREFILL_ROWS, BatchBuilder, row_buckets
from flowkv_jax.engine.step import ScheduledSequence
from flowkv_jax.request import Request
from flowkv_jax.sampling_params import SamplingParams


def request(name: str, num_tokens: int) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=range(1000, 1000 + num_tokens),
        sampling_params=SamplingParams(),
        arrival_s=0.0,
        max_total_tokens=num_tokens + 10,
        seed=0,
    )


def table(request_id: str) -> np.ndarray:
    return np.arange(100, dtype=np.int32) + 1000 * int(request_id)


def builder(max_num_seqs: int = 8) -> BatchBuilder:
    return BatchBuilder(max_num_seqs, 128, table)


def test_row_buckets():
    assert row_buckets(1) == (1,)
    assert row_buckets(5) == (1, 2, 4, 8)
    assert row_buckets(8) == (1, 2, 4, 8)


@given(
    st.lists(
        st.tuples(st.integers(0, 400), st.integers(1, 600), st.booleans()), min_size=1, max_size=12
    )
)
def test_prefill_covers_every_token_once(chunks: list[tuple[int, int, bool]]):
    prefills = [
        ScheduledSequence(request(str(i), start + size), start, size, samples)
        for i, (start, size, samples) in enumerate(chunks)
    ]
    shapes = set(builder().shapes())
    covered: dict[str, list[int]] = {str(i): [] for i in range(len(chunks))}
    targets = []
    for batch in builder().prefill(prefills):
        assert batch.shape in shapes
        assert batch.shape[0] in PREFILL_ROWS[batch.shape[1]]
        sampling = dict(batch.sampling)
        for row, sequence, start, size in batch.tiles:
            name = sequence.request.request_id
            covered[name] += range(start, start + size)
            np.testing.assert_array_equal(
                batch.tokens_RT[row, :size], range(1000 + start, 1000 + start + size)
            )
            assert batch.q_starts_R[row] == start
            assert batch.kv_lens_R[row] == start + size
            np.testing.assert_array_equal(batch.block_tables_RM[row, :100], table(name))
            is_last = start + size == sequence.start + sequence.num_tokens
            assert (row in sampling) == (is_last and sequence.samples)
            if row in sampling:
                assert batch.offsets_R[row] == size - 1
                assert batch.target_slots_R[row] == sampling[row]
                targets.append((sampling[row], name))
        padded = set(range(batch.shape[0])) - {row for row, *_ in batch.tiles}
        assert not batch.kv_lens_R[list(padded)].any()
    for i, (start, size, _) in enumerate(chunks):
        assert covered[str(i)] == list(range(start, start + size))
    # Tokens go to slots in the order of `ScheduledStep.sampling`.
    wanted = [str(i) for i, (_, _, samples) in enumerate(chunks) if samples]
    assert [name for _, name in sorted(targets)] == wanted


def test_decode_takes_unread_tokens_from_the_device():
    known, unread = request("1", 5), request("2", 7)
    batch = builder().decode(
        [ScheduledSequence(known, 4, 1, True), ScheduledSequence(unread, 7, 1, True)],
        first_sampling=3,
        slot_of={"2": 6},
    )
    assert batch.shape == (2, 1)
    assert batch.tokens_RT.tolist() == [[1004], [-1]]
    assert batch.source_slots_R.tolist() == [0, 6]
    assert batch.kv_lens_R.tolist() == [5, 8]
    assert batch.target_slots_R.tolist() == [3, 4]
    assert batch.sampling == ((0, 3), (1, 4))


def test_decode_pads_to_a_bucket_with_rows_that_write_nowhere():
    decodes = [ScheduledSequence(request(str(i), 9), 8, 1, True) for i in range(3)]
    batch = builder().decode(decodes, 0, {})
    assert batch.shape == (4, 1)
    assert batch.kv_lens_R[3] == 0
    assert batch.target_slots_R[3] == builder().num_slots


@pytest.mark.parametrize(
    ("lengths", "shape"),
    [
        ([5], (1, 16)),
        ([17], (2, 16)),
        ([40], (1, 64)),
        ([128] * 8, (16, 64)),
        ([256], (1, 256)),
        ([1024], (4, 256)),
        ([10] * 8, (8, 16)),
    ],
)
def test_tile_that_pads_least(lengths: list[int], shape: tuple[int, int]):
    prefills = [ScheduledSequence(request("1", n), 0, n, True) for n in lengths]
    assert [batch.shape for batch in builder().prefill(prefills)] == [shape]
