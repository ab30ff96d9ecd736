"""What a hostile or clumsy caller does to an engine: it is told off, and the engine goes on."""

from __future__ import annotations

import gc
import math
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from flowkv_jax import Engine, SamplingParams
from flowkv_jax.engine.admission import check_options
from flowkv_jax.engine.node import Node
from flowkv_jax.engine.output_stream import OutputStream
from flowkv_jax.engine.prompts import as_request_ids, tokenize
from flowkv_jax.engine.queues import LiveRequest, LiveRequests
from flowkv_jax.engine.sampling_batch import SamplingBatcher
from flowkv_jax.engine.sampling_state import SamplingState
from flowkv_jax.engine.stop_rules import StopRule
from flowkv_jax.errors import EngineDeadError, GenerationError, ValidationError
from flowkv_jax.request import Request
from flowkv_jax.tokenizer import Tokenizer

HALF_PAIR = "a\ud800"


def node_of(engine: Engine) -> Node:
    """The node of an engine that has one."""
    (node,) = engine._cluster.nodes.values()
    return node


GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
GOOD = {"request_id": None, "priority": 0, "cache_salt": None, "timeout": None}


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("request_id", 3),
        ("request_id", b"id"),
        ("request_id", ""),
        ("request_id", HALF_PAIR),
        ("request_id", "r" * 513),
        ("priority", "high"),
        ("priority", None),
        ("priority", 1.5),
        ("priority", math.nan),
        ("priority", 2**31),
        ("cache_salt", 3),
        ("cache_salt", b"salt"),
        ("cache_salt", HALF_PAIR),
        ("cache_salt", "s" * 1025),
        ("timeout", "soon"),
        ("timeout", math.nan),
        ("timeout", math.inf),
        ("timeout", 10**400),
        ("timeout", 0),
        ("timeout", True),
    ],
)
def test_options_of_a_wrong_kind_are_refused_by_name(parameter: str, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        check_options(**{**GOOD, parameter: value})
    assert caught.value.parameter == parameter


def test_an_engine_refuses_wrong_options_and_goes_on(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(scheduling_policy="priority")
    expected = engine.generate("hello", GREEDY)[0].text
    wrong: list[dict[str, Any]] = [
        {"priority": [object(), object()]},
        {"cache_salt": 3},
        {"cache_salt": HALF_PAIR},
        {"timeout": "soon"},
        {"request_id": ["same", "same"]},
    ]
    for options in wrong:
        with pytest.raises(Exception, match=next(iter(options))) as caught:
            engine.generate(["hello" * 20, "hello"], GREEDY, **options)
        assert caught.value.__class__.__module__ == "flowkv_jax.errors"
    for conversation in (5, None, "hello", [5], [{"role": "user", "content": "hi"}, 5]):
        with pytest.raises(ValidationError):
            engine.chat(conversation, GREEDY)  # type: ignore[arg-type]
    assert engine.generate("hello", GREEDY)[0].text == expected
    assert engine.is_healthy


@pytest.mark.parametrize("value", [5, None, b"id", ["a", 3], [["a"]]])
def test_ids_to_abort_are_texts(value: Any) -> None:
    with pytest.raises(ValidationError, match="request_id"):
        as_request_ids(value)


def test_an_array_among_prompts_is_no_token_id(make_engine: Callable[..., Engine]) -> None:
    with pytest.raises(ValidationError, match="prompt"):
        make_engine().generate([np.array([1, 2, 3])], GREEDY)  # type: ignore[list-item]


def test_a_request_that_cannot_be_queued_leaves_nothing() -> None:
    live = LiveRequests()
    for name, priority in (("first", 0), ("second", "x")):
        request = Request(name, [1], GREEDY, arrival_s=0.0, max_total_tokens=8, seed=0)
        order: Any = (priority, 0.0, 0)
        one = LiveRequest(request, order, StopRule.of(request, ()))
        if name == "first":
            live.add(one)
        else:
            with pytest.raises(TypeError):
                live.add(one)
    assert len(live) == len(live.waiting) == 1


# Prompts


class CountingEncoder:
    """A token a character; counts what it was asked to encode."""

    max_token_characters = 4

    def __init__(self) -> None:
        self.num_characters = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.num_characters += len(text)
        return [ord(character) % 100 for character in text]

    def decode(self, token_ids: Any, skip_special_tokens: bool = True) -> str:
        raise AssertionError("not asked for")


def test_text_that_cannot_fit_is_refused_without_tokenising_it() -> None:
    encoder = CountingEncoder()
    with pytest.raises(ValidationError, match="characters is too long"):
        tokenize("x" * (1 << 20), encoder, GREEDY, vocab_size=512, max_prompt_tokens=100)
    assert encoder.num_characters == 0


def test_text_to_be_truncated_is_tokenised_from_its_end() -> None:
    encoder = CountingEncoder()
    text = "".join(chr(97 + i * i % 26) for i in range(1 << 20))
    params = SamplingParams(truncate_prompt_tokens=100)
    prompt = tokenize(text, encoder, params, vocab_size=512, max_prompt_tokens=200)
    assert prompt.token_ids == CountingEncoder().encode(text[-100:])
    assert encoder.num_characters < len(text) // 8


def test_too_many_ids_are_refused_before_each_is_looked_at() -> None:
    with pytest.raises(ValidationError, match="1000 tokens is too long"):
        tokenize([-1] * 1000, CountingEncoder(), GREEDY, vocab_size=512, max_prompt_tokens=100)


def test_long_text_has_the_tokens_of_its_parts(tiny_model: Callable[[str], Path]) -> None:
    tokenizer = Tokenizer.from_folder(tiny_model("gqa_tied"))
    line = "the quick brown fox\n"
    once = tokenizer.encode(line, add_special_tokens=False)
    assert tokenizer.encode(line * 1000, add_special_tokens=False) == once * 1000
    with pytest.raises(ValidationError):
        tokenizer.encode(HALF_PAIR * 10_000)


@pytest.mark.parametrize("penalty", [1e308, 1e-308])
def test_an_extreme_repetition_penalty_stays_finite_in_float32(penalty: float) -> None:
    params = SamplingParams(repetition_penalty=penalty)
    state = SamplingState(params, token_ids=[3], num_prompt_tokens=1, seed=0)
    inputs, _ = SamplingBatcher(512).build([state], [1], 2)
    repetition = np.asarray(inputs.repetition)
    assert np.isfinite(repetition).all() and (repetition > 0).all()


# The engine's life


def test_a_dropped_engine_ends_its_thread(make_engine: Callable[..., Engine]) -> None:
    kept = make_engine()
    engine = Engine(config=kept.config)
    engine.generate("hello", GREEDY)
    reference, thread = weakref.ref(engine), node_of(engine)._thread
    del engine
    gc.collect()
    assert reference() is None
    thread.join(timeout=60)
    assert not thread.is_alive()


def test_an_engine_lives_as_long_as_its_stream(make_engine: Callable[..., Engine]) -> None:
    config = make_engine().config
    stream = Engine(config=config).generate("hello", GREEDY, stream=True)
    gc.collect()
    assert [output.outputs[0].finish_reason for output in stream][-1] == "length"


def test_without_its_thread_an_engine_says_so(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    # As it looks in a forked child: the thread is not there, and the lock may have been held.
    with monkeypatch.context() as patch:
        patch.setattr(node_of(engine), "_thread", threading.Thread())
        patch.setattr(node_of(engine), "_death_lock", None)
        with pytest.raises(EngineDeadError, match="fork"):
            engine.generate("hello", GREEDY)
        assert engine.abort("anything") == 0
        assert not engine.is_healthy
    assert engine.is_healthy


def test_whoever_waits_when_the_engine_dies_is_told(make_engine: Callable[..., Engine]) -> None:
    node = node_of(make_engine())
    go_on = threading.Event()

    def die() -> None:
        go_on.wait()
        raise SystemExit("killed by a test")

    killer, given_up, waiting = node.call(die), node.call(lambda: 1), node.call(lambda: 2)
    given_up.cancel()
    go_on.set()
    assert isinstance(killer.exception(timeout=60), SystemExit)
    assert isinstance(waiting.exception(timeout=60), EngineDeadError)


def test_a_stream_may_be_collected_while_a_message_is_posted(
    make_engine: Callable[..., Engine],
) -> None:
    engine = make_engine()
    stream = engine.generate("hello", SamplingParams(max_tokens=400), stream=True)
    with node_of(engine)._death_lock:
        assert node_of(engine)._death_lock.acquire(blocking=False)
        node_of(engine)._death_lock.release()
        del stream
    assert engine.generate("hello", GREEDY)[0].finished


def test_a_dead_engine_shows_no_load(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    stream = engine.generate(["a", "b"], SamplingParams(max_tokens=400), stream=True)
    next(stream)
    engine.shutdown()
    load = engine.get_loads()
    assert load.num_requests_running == load.num_requests_waiting == 0
    assert load.num_free_blocks == load.num_blocks
    assert [output.outputs[0].finish_reason for output in stream][-1] == "abort"


def test_a_stream_that_outlives_the_program_ends_quietly(
    make_engine: Callable[..., Engine],
) -> None:
    engine = make_engine()
    stream = engine.generate("hello", SamplingParams(max_tokens=400), stream=True)
    assert isinstance(stream, OutputStream)
    stream.__del__(lambda: True)  # as at exit: nothing can be called any more
    assert next(stream).outputs[0].finish_reason is None
    stream.__del__()
    assert list(stream) == []


@pytest.mark.parametrize("implementation", ["cpu", "xla", "gpu", "reference"])
def test_what_the_pool_held_before_is_never_read(
    make_engine: Callable[..., Engine], implementation: str
) -> None:
    """A block's last owner may have left anything in it, NaN too."""
    settings = {"attention_implementation": implementation, "enable_prefix_caching": False}
    engine = make_engine("wide_head_dim", **settings)
    prompts = [list(range(3, 3 + n)) for n in (1, 15, 16, 17, 40)]
    expected = [o.outputs[0].token_ids for o in engine.generate(prompts, GREEDY)]
    pool = engine._runners[0].pool
    pool.update(lambda old: (jnp.full_like(old, jnp.nan), None))
    assert [o.outputs[0].token_ids for o in engine.generate(prompts, GREEDY)] == expected


def test_debug_mode_refuses_a_block_outside_the_pool(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(debug=True)
    batches = engine._runners[0]._batches
    right = batches._block_table
    batches._block_table = lambda request_id: right(request_id) + np.int32(64)
    with pytest.raises(GenerationError, match=r"outside the pool's \[0, 64\)"):
        engine.generate([5, 6, 7], GREEDY)
    batches._block_table = right
    assert engine.generate([5, 6, 7], GREEDY)[0].finished
