"""Several nodes in one process, and something goes wrong: answers are right, nothing is left."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flowkv_jax import Engine, RequestOutput, SamplingParams
from flowkv_jax.errors import DeadlineExceeded, EngineDeadError, GenerationError
from tests.test_equality_handoff import check_books, prompts, records, told
from transfer.errors import BackendError

MakeEngine = Callable[..., Engine]
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
BATCH = prompts((5, 16, 33, 60))


@pytest.fixture(scope="module")
def expected(tiny_model: Callable[..., object], xla_cache: object) -> list[object]:
    with Engine(
        str(tiny_model("gqa_tied")),
        max_num_seqs=4,
        max_num_batched_tokens=128,
        num_blocks=64,
        max_model_len=512,
        compilation_cache_dir=str(xla_cache),
    ) as engine:
        return told(engine.generate(BATCH, PARAMS))


def one_and_one(make_engine: MakeEngine, **options: Any) -> Engine:
    return make_engine(prefill_nodes=1, decode_nodes=1, **options)


def wait_for_empty(engine: Engine) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            return check_books(engine)
        except AssertionError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def stream_until(engine: Engine, index: int, do: Callable[[], object]) -> list[RequestOutput]:
    """Stream `BATCH`, do something after so many outputs; the last output of each request."""
    last: dict[int, RequestOutput] = {}
    for number, output in enumerate(engine.generate(BATCH, PARAMS, stream=True)):
        last[len(output.prompt_token_ids or ())] = output
        if number == index:
            do()
    return [last[length] for length in sorted(last)]


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_transfers_that_fail(
    make_engine: MakeEngine, expected: list[object], monkeypatch: pytest.MonkeyPatch, policy: str
):
    engine = one_and_one(make_engine, kv_load_failure_policy=policy)

    def fail(*args: object, **options: object) -> None:
        raise BackendError("injected")

    monkeypatch.setattr(engine._cluster._exchange.transfers, "submit", fail)
    if policy == "fail":
        with pytest.raises(GenerationError, match=r"injected .*kv_load_failure_policy=fail"):
            engine.generate(BATCH[0], PARAMS)
    else:
        assert told(engine.generate(BATCH, PARAMS)) == expected
        assert {record.decode_node for record in records(engine)} == {"prefill-0"}
    wait_for_empty(engine)


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("index", [1, 30])
def test_a_node_that_dies(make_engine: MakeEngine, expected: list[object], name: str, index: int):
    engine = make_engine(prefill_nodes=1, decode_nodes=1, hybrid_nodes=1)
    node = engine._cluster.nodes[name]

    def die() -> None:
        node.call(_raise)

    assert told(stream_until(engine, index, die)) == expected
    assert not node.is_alive
    assert told(engine.generate(BATCH, PARAMS)) == expected
    del engine._cluster.nodes[name]
    wait_for_empty(engine)


def _raise() -> None:
    raise SystemExit("injected")


def test_a_step_that_fails_ends_no_more_than_it_must(
    make_engine: MakeEngine, expected: list[object], monkeypatch: pytest.MonkeyPatch
):
    """P's device fails while D decodes: what has been handed off goes on."""
    engine = one_and_one(make_engine)
    runner = engine._cluster.nodes["prefill-0"]._runner
    dispatch = runner.dispatch
    stream = engine.generate(BATCH[0], PARAMS, stream=True)
    outputs = list(itertools.islice(stream, 4))

    def fail(*args: object) -> None:
        monkeypatch.setattr(runner, "dispatch", dispatch)
        raise RuntimeError("injected")

    monkeypatch.setattr(runner, "dispatch", fail)
    with pytest.raises(GenerationError, match="injected"):
        engine.generate(BATCH[1], PARAMS)
    outputs += list(stream)
    assert told(outputs[-1:]) == expected[:1]
    assert told(engine.generate(BATCH, PARAMS)) == expected
    wait_for_empty(engine)


def test_abort_and_deadline_at_any_time(make_engine: MakeEngine, expected: list[object]):
    engine = one_and_one(make_engine)
    engine.generate(BATCH, PARAMS)
    for number in range(12):
        stream = engine.generate(BATCH, PARAMS, stream=True)
        list(itertools.islice(stream, number))
        stream.close()
    for milliseconds in (1, 3, 6, 10, 15):
        try:
            engine.generate(BATCH, PARAMS, timeout=milliseconds / 1e3)
        except DeadlineExceeded:
            continue
    assert told(engine.generate(BATCH, PARAMS)) == expected
    wait_for_empty(engine)


def test_stop_string_in_the_very_first_token(make_engine: MakeEngine):
    engine = one_and_one(make_engine)
    (first,) = engine.generate(BATCH[1], SamplingParams(temperature=0, max_tokens=1))
    text = first.outputs[0].text
    assert text
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=[text])
    (output,) = engine.generate(BATCH[1], params)
    answer = output.outputs[0]
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("", "stop", text)
    wait_for_empty(engine)


def test_shut_down_in_the_middle(make_engine: MakeEngine):
    engine = make_engine(prefill_nodes=2, decode_nodes=2)
    stream = engine.generate(BATCH, PARAMS, stream=True)
    next(stream)
    ending = threading.Thread(target=engine.shutdown)
    ending.start()
    last = {output.request_id: output for output in stream}
    ending.join(30)
    assert not ending.is_alive()
    assert all(output.finished for output in last.values())
    assert not [t for t in threading.enumerate() if "prefill-" in t.name or "decode-" in t.name]
    with pytest.raises(EngineDeadError):
        engine.generate(BATCH[0], PARAMS)


def test_pools_stay_where_they_are(make_engine: MakeEngine, expected: list[object]):
    """No copy of a pool is made for a hand-off, on either side."""
    engine = one_and_one(make_engine)
    pools = [node._runner.pool for node in engine._cluster.nodes.values()]
    before = [pool.kv_PL2ZKH.unsafe_buffer_pointer() for pool in pools]
    for seed in range(3):
        batch = [np.random.default_rng(seed).integers(3, 500, n).tolist() for n in (7, 90, 200)]
        engine.generate(batch, PARAMS)
    assert told(engine.generate(BATCH, PARAMS)) == expected
    assert sum(record.handoff is not None for record in records(engine)) >= 12
    assert [pool.kv_PL2ZKH.unsafe_buffer_pointer() for pool in pools] == before
