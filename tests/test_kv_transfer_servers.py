"""Two servers and a router that hands one request from one to the other: answers are those of one
server alone whatever goes wrong between the two calls, and nothing is left on either."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flowkv_jax import Engine, RequestOutput, SamplingParams
from flowkv_jax.errors import (
    ConfigError,
    DuplicateRequestError,
    GenerationError,
    UnprocessableError,
    ValidationError,
)
from tests.kv_prefill_server import prefill_server
from tests.metered_cluster import samples_of
from tests.test_equality_handoff import check_books, prompts, records, told
from tests.tiny_models import write_tiny_model

MakeEngine = Callable[..., Engine]
TO_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
SECRET = b"of the servers"
PROMPT = prompts((60,))[0]


def server(make_engine: MakeEngine, role: str, **options: Any) -> Engine:
    settings = {"kv_role": role, "kv_port": 0, "cluster_secret": SECRET}
    return make_engine(**(settings | options))


@pytest.fixture(scope="module")
def settings(xla_cache: Path) -> dict[str, Any]:
    return {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 128,
        "num_blocks": 64,
        "max_model_len": 512,
        "compilation_cache_dir": str(xla_cache),
        "debug": True,
    }


@pytest.fixture(scope="module")
def alone(tiny_model: Callable[[str], Path], settings: dict[str, Any]) -> Iterator[Engine]:
    """One server, which answers as all must."""
    with Engine(str(tiny_model("gqa_tied")), **settings) as engine:
        yield engine


@pytest.fixture(scope="module")
def pair(
    tiny_model: Callable[[str], Path], settings: dict[str, Any]
) -> Iterator[tuple[Engine, Engine]]:
    model = str(tiny_model("gqa_tied"))
    both = settings | {"kv_port": 0, "cluster_secret": SECRET}
    with (
        Engine(model, **both, kv_role="kv_producer") as p,
        Engine(model, **both, kv_role="kv_consumer") as d,
    ):
        yield p, d


@pytest.fixture
def two(pair: tuple[Engine, Engine]) -> Iterator[tuple[Engine, Engine]]:
    """A prefilling and a decoding server, with nothing cached."""
    yield pair
    check_empty(*pair)
    for engine in pair:
        assert engine.reset_prefix_cache()


def prefill(engine: Engine, prompt: list[int] = PROMPT, **options: Any) -> dict[str, Any]:
    """The router's first call; what it brings to the second."""
    [output] = engine.generate([prompt], ONE_TOKEN, kv_transfer_params=TO_PREFILL, **options)
    assert output.kv_transfer_params is not None
    return output.kv_transfer_params


def decode(
    engine: Engine,
    params: dict[str, Any],
    prompt: list[int] = PROMPT,
    sampling: SamplingParams = GREEDY,
    **options: Any,
) -> RequestOutput:
    """The router's second call."""
    [output] = engine.generate([prompt], sampling, kv_transfer_params=params, **options)
    return output


def until(condition: Callable[[], Any]) -> None:
    ends_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < ends_s
        time.sleep(0.005)


def num_holds(engine: Engine) -> int:
    nodes = engine._cluster.nodes.values()
    return sum(node.call(lambda node=node: len(node._handoffs._holds)).result() for node in nodes)


def check_empty(*engines: Engine) -> None:
    for engine in engines:
        ends_s = time.monotonic() + 20
        while True:
            try:
                check_books(engine)
                break
            except AssertionError:
                assert time.monotonic() < ends_s
                time.sleep(0.01)
        assert num_holds(engine) == 0
        until(lambda engine=engine: not engine._cluster.connector._lender._borrowers)
        engine._cluster.dispatcher.check()


@contextmanager
def stalled(engine: Engine) -> Iterator[None]:
    """The engine's nodes do nothing meanwhile."""
    go_on = threading.Event()
    stopped = []
    for node in engine._cluster.nodes.values():
        reached: Future[None] = Future()
        node.post(lambda reached=reached: (reached.set_result(None), go_on.wait(20)))
        stopped.append(reached)
    for reached in stopped:
        reached.result(10)
    try:
        yield
    finally:
        go_on.set()


# What is to happen


def test_prompt_of_one_server_is_decoded_by_another(
    two: tuple[Engine, Engine], alone: Engine
) -> None:
    p, d = two
    params = prefill(p)
    info = p.kv_transfer_info()
    assert info is not None
    assert {key: params[key] for key in TO_PREFILL} == {
        "do_remote_decode": False,
        "do_remote_prefill": True,
    }
    assert (params["remote_engine_id"], params["remote_host"], params["remote_port"]) == (
        info.engine_id,
        info.host,
        info.port,
    )
    assert len(params["remote_block_ids"]) == len(PROMPT) // 16
    assert num_holds(p) == 1
    output = decode(d, params)
    assert told([output]) == told(alone.generate([PROMPT], GREEDY))
    assert output.kv_transfer_params is None
    record = records(d)[-1]
    assert record.handoff is not None
    assert (record.handoff.num_blocks, record.handoff.calls) == (4, 1)
    assert record.prefill_node == params["remote_node"]
    assert record.num_cached_tokens == 48


def test_two_servers_that_can_be_paired_say_so(two: tuple[Engine, Engine], alone: Engine) -> None:
    here, there = (engine.kv_transfer_info() for engine in two)
    assert here is not None and there is not None
    assert here.pairing_protocol == there.pairing_protocol
    assert (here.role, there.role) == ("kv_producer", "kv_consumer")
    assert here.engine_id != there.engine_id
    assert (here.block_size, here.cache_dtype, here.tensor_parallel_size) == (16, "float32", 1)
    assert alone.kv_transfer_info() is None


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=1.0, seed=7, max_tokens=6, n=3),
        SamplingParams(temperature=1.0, seed=8, max_tokens=6, logprobs=2, prompt_logprobs=1),
        SamplingParams(temperature=0, max_tokens=6, stop=["e"], repetition_penalty=1.2),
        SamplingParams(temperature=0, max_tokens=1),
    ],
)
def test_the_decoding_servers_parameters_count(
    two: tuple[Engine, Engine], alone: Engine, sampling: SamplingParams
) -> None:
    p, d = two
    output = decode(d, prefill(p), sampling=sampling)
    expected = alone.generate([PROMPT], sampling)
    assert told([output]) == told(expected)
    assert output.prompt_logprobs is None or [
        None if entry is None else set(entry) for entry in output.prompt_logprobs
    ] == [None if entry is None else set(entry) for entry in expected[0].prompt_logprobs or ()]


def test_many_at_once_under_the_same_request_ids(two: tuple[Engine, Engine], alone: Engine) -> None:
    p, d = two
    batch = prompts((5, 16, 33, 47, 60, 100), seed=3)
    expected = told(alone.generate(batch, GREEDY))
    answers: dict[int, RequestOutput] = {}

    def route(index: int) -> None:
        params = prefill(p, batch[index], request_id=f"r{index}")
        answers[index] = decode(d, params, batch[index], request_id=f"r{index}")

    threads = [threading.Thread(target=route, args=(index,)) for index in range(len(batch))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told([answers[index] for index in range(len(batch))]) == expected
    assert all(record.handoff is not None for record in records(d)[-len(batch) :])


def test_a_prompt_may_be_pulled_twice_and_needs_no_hold(
    two: tuple[Engine, Engine], alone: Engine
) -> None:
    p, d = two
    expected = told(alone.generate([PROMPT], GREEDY))
    params = prefill(p)
    for _ in range(2):
        assert told([decode(d, params)]) == expected
    for node in p._cluster.nodes.values():
        assert node.reset_prefix_cache().result()
    assert told([decode(d, params)]) == expected
    assert [record.handoff is not None for record in records(d)[-3:]] == [True] * 3
    # The decoding server has the blocks already.
    assert records(d)[-1].handoff.num_reused_blocks == 3


def test_servers_of_several_nodes_in_both_roles(make_engine: MakeEngine, alone: Engine) -> None:
    options = {"prefill_nodes": 1, "decode_nodes": 1}
    p, d = (server(make_engine, "kv_both", **options) for _ in range(2))
    expected = told(alone.generate([PROMPT], GREEDY))
    params = prefill(p)
    assert told([decode(d, params)]) == expected
    assert records(d)[-1].prefill_node == params["remote_node"]
    assert told([decode(p, prefill(d))]) == expected
    assert told([decode(p, prefill(p))]) == expected  # a router may choose one server twice
    assert records(p)[-1].prefill_node in p._cluster.nodes
    check_empty(p, d)


def test_over_tcp(make_engine: MakeEngine, two: tuple[Engine, Engine], alone: Engine) -> None:
    p, (_, d) = server(make_engine, "kv_producer", handoff_backend="tcp"), two
    assert told([decode(d, prefill(p))]) == told(alone.generate([PROMPT], GREEDY))
    report = records(d)[-1].handoff
    assert report is not None and report.backend == "tcp"
    check_empty(p)


# What may go wrong


def test_prefilling_server_gone_between_the_calls(
    make_engine: MakeEngine, two: tuple[Engine, Engine], alone: Engine
) -> None:
    gone, (_, d) = server(make_engine, "kv_producer"), two
    params = prefill(gone)
    gone.shutdown()
    expected = told(alone.generate([PROMPT], GREEDY))
    for _ in range(2):
        assert told([decode(d, params)]) == expected
        assert records(d)[-1].handoff is None


def test_prefilling_server_is_killed(
    settings: dict[str, Any],
    tiny_model: Callable[[str], Path],
    two: tuple[Engine, Engine],
    alone: Engine,
) -> None:
    _, d = two
    expected = told(alone.generate([PROMPT], GREEDY))
    options = settings | {"model": str(tiny_model("gqa_tied"))}
    with prefill_server(options, SECRET) as (process, ask):
        assert told([decode(d, ask(PROMPT))]) == expected
        assert records(d)[-1].handoff is not None
        params = ask(PROMPT)
        process.kill()
        process.wait()
    assert told([decode(d, params)]) == expected
    assert records(d)[-1].handoff is None


def test_prefilling_server_lost_with_the_sequence(
    two: tuple[Engine, Engine], alone: Engine
) -> None:
    p, d = two
    decode(d, prefill(p))  # so that they know each other
    other = prompts((50,), seed=9)[0]
    params = prefill(p, other)
    with stalled(p):
        stream = d.generate([other], GREEDY, stream=True, kv_transfer_params=params)
        until(lambda: p._cluster.connector._lender._borrowers)
        for engine_id in list(d._cluster._exchange.transfers.peers):
            d._cluster._exchange.transfers.disconnect(engine_id)
        last = list(stream)[-1]
    assert last.outputs[0].token_ids == alone.generate([other], GREEDY)[0].outputs[0].token_ids
    assert records(d)[-1].num_placements == 2
    decode(d, prefill(p))  # they meet again
    assert records(d)[-1].handoff is not None


def test_failing_instead_of_computing_the_prompt_again(make_engine: MakeEngine) -> None:
    p = server(make_engine, "kv_producer")
    d = server(make_engine, "kv_consumer", kv_load_failure_policy="fail")
    params = prefill(p)
    assert len(decode(d, params).outputs[0].token_ids) == 10
    for bad in (
        params | {"remote_host": "8.8.8.8"},
        params | {"remote_engine_id": "another"},
    ):
        with pytest.raises(GenerationError, match="kv_load_failure_policy=fail"):
            decode(d, bad)
    params = prefill(p)
    p.shutdown()
    with pytest.raises(GenerationError, match=r"could not be moved.*kv_load_failure_policy=fail"):
        decode(d, params)
    check_empty(d)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"cluster_secret": b"another"}, "secret"),
        ({"variant": "mha_untied"}, "num_kv_heads 4 there, 8 here"),
        ({"block_size": 8}, "block_size 16 there, 8 here"),
    ],
)
def test_servers_that_do_not_match_compute_for_themselves(
    make_engine: MakeEngine,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, Any],
    named: str,
) -> None:
    p = server(make_engine, "kv_producer", kv_hold_s=0.5)
    d = server(make_engine, "kv_consumer", **options)
    with caplog.at_level(logging.WARNING):
        output = decode(d, prefill(p), sampling=ONE_TOKEN)
    assert told([output]) == told(d.generate([PROMPT], ONE_TOKEN))
    assert records(d)[0].handoff is None
    until(lambda: caplog.records)
    assert re.search(named, caplog.text)
    check_empty(p, d)


def test_servers_of_other_weights_compute_for_themselves(
    two: tuple[Engine, Engine],
    settings: dict[str, Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    p, _ = two
    rounded = str(write_tiny_model(tmp_path / "rounded", "gqa_tied", "bfloat16"))
    others = settings | {"kv_port": 0, "cluster_secret": SECRET, "dtype": "float32"}
    with Engine(rounded, **others, kv_role="kv_consumer") as d:
        output = decode(d, prefill(p), sampling=ONE_TOKEN)
        assert told([output]) == told(d.generate([PROMPT], ONE_TOKEN))
        assert records(d)[0].handoff is None
        assert re.search("is refused: weights .* here, .* there", caplog.text)
        check_empty(p, d)


def test_addresses_that_are_not_allowed_are_not_connected_to(
    make_engine: MakeEngine, alone: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    p = server(make_engine, "kv_producer", kv_hold_s=0.2)
    d = server(make_engine, "kv_consumer", kv_peers="10.0.0.0/8")
    output = decode(d, prefill(p))
    assert told([output]) == told(alone.generate([PROMPT], GREEDY))
    assert "remote_host='127.0.0.1' is not in kv_peers (10.0.0.0/8)" in caplog.text
    assert d._cluster._exchange.transfers.peers == {}
    check_empty(p, d)


def test_a_servers_own_node_is_not_borrowed_from_another(
    two: tuple[Engine, Engine], alone: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """It would take the place of the node itself, and the server would serve nobody any more."""
    p, d = two
    params = prefill(p)
    expected = told(alone.generate([PROMPT], GREEDY))
    for node in d._cluster.nodes:
        assert told([decode(d, {**params, "remote_node": node})]) == expected
        assert f"node {node} is this server's own" in caplog.text
    assert told([decode(d, params)]) == expected


def test_hold_expires_and_the_answer_is_the_same(make_engine: MakeEngine, alone: Engine) -> None:
    p = server(make_engine, "kv_producer", kv_hold_s=0.1)
    d = server(make_engine, "kv_consumer")
    params = prefill(p)
    check_empty(p)  # by itself, though nothing happens at the node
    expired = "vllm:nixl_num_kv_expired_reqs_total"
    assert [count for _, count in samples_of(p.metrics, expired)] == [1]
    assert told([decode(d, params)]) == told(alone.generate([PROMPT], GREEDY))
    check_empty(p, d)


def test_a_prefilling_server_that_takes_too_long_is_given_up(
    make_engine: MakeEngine, alone: Engine
) -> None:
    p = server(make_engine, "kv_producer")
    d = server(make_engine, "kv_consumer", kv_load_timeout_s=0.3)
    params = prefill(p)
    with stalled(p):
        assert told([decode(d, params)]) == told(alone.generate([PROMPT], GREEDY))
    assert records(d)[-1].num_placements == 2
    check_empty(p, d)


def test_a_decoding_server_without_room_is_asked_again(
    make_engine: MakeEngine, two: tuple[Engine, Engine], alone: Engine
) -> None:
    p, (_, d) = server(make_engine, "kv_producer", handoff_wait_s=1.0), two

    def num_retries() -> float:
        samples = samples_of(d.metrics, "flowkv_redirects_total")
        return sum(count for labels, count in samples if labels["reason"] == "handoff_failed")

    params, before = prefill(p), num_retries()
    with stalled(d):
        stream = d.generate([PROMPT], GREEDY, stream=True, kv_transfer_params=params)
        until(lambda: num_retries() > before)
    last = list(stream)[-1]
    assert last.outputs[0].token_ids == alone.generate([PROMPT], GREEDY)[0].outputs[0].token_ids
    assert records(d)[-1].handoff is not None
    assert records(d)[-1].num_placements == 1
    check_empty(p)


@pytest.mark.parametrize("stalls", ["prefilling", "decoding", "neither"])
def test_decoding_servers_request_is_aborted_under_way(
    two: tuple[Engine, Engine], stalls: str
) -> None:
    p, d = two
    decode(d, prefill(p))
    other = prompts((50,), seed=4)[0]
    params = prefill(p, other)

    def abort() -> None:
        stream = d.generate([other], GREEDY, stream=True, kv_transfer_params=params, request_id="a")
        assert d.abort("a") == 1
        assert [output.outputs[0].finish_reason for output in stream][-1] == "abort"

    if stalls == "neither":
        abort()
    else:
        with stalled(p if stalls == "prefilling" else d):
            abort()
            time.sleep(0.02)


def test_a_request_that_is_refused_gives_the_hold_back(two: tuple[Engine, Engine]) -> None:
    p, d = two
    params = prefill(p)
    with pytest.raises(ValidationError, match="logprobs"):
        decode(d, params, sampling=SamplingParams(logprobs=100))
    check_empty(p, d)
    params = prefill(p)
    stream = d.generate([PROMPT], LONG, stream=True, request_id="a")
    next(stream)
    with pytest.raises(DuplicateRequestError, match="in use"):
        decode(d, params, request_id="a")
    stream.close()


def test_held_prompts_give_way_when_nothing_else_can_run(make_engine: MakeEngine) -> None:
    p = server(make_engine, "kv_producer", max_model_len=1024)
    for prompt in prompts((240, 250), seed=5):
        prefill(p, prompt)
    assert num_holds(p) == 2
    [long] = prompts((800,), seed=6)
    assert len(p.generate([long], GREEDY)[0].outputs[0].token_ids) == 10
    assert num_holds(p) <= 1
    assert p.get_loads().num_preemptions == 0


def test_a_request_without_an_answer_holds_nothing(two: tuple[Engine, Engine]) -> None:
    p, _ = two
    stream = p.generate([PROMPT], LONG, stream=True, kv_transfer_params=TO_PREFILL)
    next(stream)
    stream.close()
    check_empty(p)
    assert p._cluster.connector._lender._prompts == {}


# What is refused


def test_servers_without_the_role_refuse(two: tuple[Engine, Engine], alone: Engine) -> None:
    p, d = two
    params = prefill(p)
    with pytest.raises(UnprocessableError, match="kv_role=kv_producer"):
        decode(p, params)
    with pytest.raises(UnprocessableError, match="kv_role=kv_consumer"):
        prefill(d)
    with pytest.raises(UnprocessableError, match="no kv_role"):
        decode(alone, params)
    with pytest.raises(ValidationError, match="one prompt"):
        d.generate([PROMPT, PROMPT], GREEDY, kv_transfer_params=params)
    decode(d, params)


def test_nobody_may_join_without_a_secret_from_elsewhere(make_engine: MakeEngine) -> None:
    with pytest.raises(ConfigError, match="secret") as raised:
        server(make_engine, "kv_both", cluster_secret=b"", kv_host="192.0.2.1")
    assert raised.value.parameter == "kv_host"


def test_a_port_in_use_is_named(two: tuple[Engine, Engine], make_engine: MakeEngine) -> None:
    info = two[0].kv_transfer_info()
    assert info is not None
    with pytest.raises(ConfigError, match=f"kv_port={info.port}: cannot listen"):
        server(make_engine, "kv_both", kv_port=info.port)
