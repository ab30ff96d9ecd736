"""The engine from outside, on tiny models: what it returns, and that nothing is left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from flowkv_jax import Engine, SamplingParams
from flowkv_jax.engine.model_runner import InFlightStep
from flowkv_jax.engine.node import Node
from flowkv_jax.errors import (
    ConfigError,
    DeadlineExceeded,
    DuplicateRequestError,
    EngineDeadError,
    GenerationError,
    QueueOverflowError,
    UnprocessableError,
    ValidationError,
)
from flowkv_jax.sampling_params import RequestOutputKind

MakeEngine = Callable[..., Engine]


def node_of(engine: Engine) -> Node:
    """The node of an engine that has one."""
    (node,) = engine._cluster.nodes.values()
    return node


GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
RANDOM = SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=24, ignore_eos=True)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(3, 512, length).tolist()


def tokens(output) -> list[int]:
    return output.outputs[0].token_ids


def is_idle(engine: Engine) -> bool:
    """Every block free again; asked on the node's thread, after whatever was posted before."""
    node_of(engine).call(node_of(engine)._kv.check).result()
    load = node_of(engine).call(node_of(engine)._scheduler.load).result()
    busy = load.num_requests_running + load.num_requests_waiting + load.num_requests_swapped
    return busy == 0 and load.num_free_blocks == load.num_blocks


# What goes in and comes out


def test_prompt_forms_and_order(make_engine: MakeEngine):
    engine = make_engine()
    text = "the quick brown fox"
    ids = engine.get_tokenizer().encode(text)
    forms = [text, ids, {"prompt": text}, {"prompt_token_ids": ids}, np.array(ids).tolist()]
    outputs = engine.generate(forms, GREEDY)
    assert [output.prompt_token_ids for output in outputs] == [ids] * 5
    assert len({tuple(tokens(output)) for output in outputs}) == 1
    assert engine.generate(text, GREEDY)[0].text == outputs[0].text
    assert tokens(engine.generate(input_ids=ids, sampling_params=GREEDY)[0]) == tokens(outputs[0])
    lengths = [5, 1, 40, 17, 3, 100]
    outputs = engine.generate([prompt(n) for n in lengths], GREEDY)
    assert [len(output.prompt_token_ids) for output in outputs] == lengths
    assert all(output.finished for output in outputs)
    assert is_idle(engine)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "prompts is empty"),
        ("", "prompt is empty"),
        ([[]], "prompt is empty"),
        ([512], r"token id 512; ids are integers in \[0, 512\)"),
        ([-1, 4], "token id -1"),
        ([[1, 2.5]], "token id 2.5"),
        ([[True, 4]], "token id True"),
        ({"text": "x"}, "key 'prompt' or 'prompt_token_ids'"),
        (5, "prompts must be text"),
        (b"bytes", "prompts must be text"),
        ([b"bytes"], "a prompt is text"),
        ([3] * 512, "prompt of 512 tokens is too long: at most 511"),
    ],
)
def test_bad_prompts(make_engine: MakeEngine, prompts: object, message: str):
    engine = make_engine()
    with pytest.raises(ValidationError, match=message):
        engine.generate(prompts, GREEDY)
    assert is_idle(engine)


def test_bad_arguments(make_engine: MakeEngine):
    engine = make_engine()
    for arguments, message in (
        ({"prompts": "x", "input_ids": [1]}, "either prompts or input_ids"),
        ({}, "either prompts or input_ids"),
        ({"prompts": "x", "sampling_params": 5}, "must be SamplingParams or a dict"),
        ({"prompts": "x", "sampling_params": {"max_token": 5}}, "max_token"),
        ({"prompts": ["x", "y"], "sampling_params": [GREEDY]}, "1 items for 2 prompts"),
        ({"prompts": "x", "timeout": 0}, "timeout=0 must be positive"),
        ({"prompts": "x", "request_id": [""]}, "must be non-empty text"),
        ({"prompts": "x", "sampling_params": {"stop_token_ids": [600]}}, "stop_token_ids"),
        ({"prompts": "x", "sampling_params": {"logprobs": 21}}, "logprobs"),
        ({"prompts": "x", "sampling_params": {"temperature": float("nan")}}, "temperature"),
    ):
        with pytest.raises(ValidationError, match=message):
            engine.generate(**arguments)
    with pytest.raises(UnprocessableError, match="guided_json"):
        engine.generate("x", {"guided_json": "{}"})
    assert is_idle(engine)


def test_never_fits(make_engine: MakeEngine):
    engine = make_engine(num_blocks=4)
    with pytest.raises(ValidationError, match="the pool has 4"):
        engine.generate(prompt(20), SamplingParams(max_tokens=100))
    # Without max_tokens the answer is bounded by the pool instead.
    output = engine.generate(prompt(20), SamplingParams(temperature=0, max_tokens=None))[0]
    assert output.outputs[0].finish_reason in ("stop", "length")
    assert is_idle(engine)


def test_bad_configuration(make_engine: MakeEngine):
    for overrides, message in (
        ({"max_seqs": 3}, "unknown key 'max_seqs'; did you mean 'max_num_seqs'"),
        ({"max_model_len": 5000}, "max_model_len=5000 exceeds the model's"),
        ({"tensor_parallel_size": 3}, "does not divide"),
        ({"tensor_parallel_size": 16}, "exceeds the 4 cpu devices"),
        ({"kv_cache_memory_bytes": 10, "num_blocks": None}, "hold no block"),
        ({"chat_template": "missing.jinja"}, "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_engine(**overrides)


def test_chat(make_engine: MakeEngine):
    engine = make_engine()
    messages = [{"role": "user", "content": "hello"}]
    one = engine.chat(messages, GREEDY)[0]
    text = engine.get_tokenizer().apply_chat_template(messages)
    assert one.prompt_token_ids == engine.get_tokenizer().encode(text, add_special_tokens=False)
    assert [tokens(o) for o in engine.chat([messages, messages], GREEDY)] == [tokens(one)] * 2
    with pytest.raises(ValidationError):
        engine.chat([{"role": "user"}], GREEDY)


def test_broken_chat_template_is_a_clear_error(make_engine: MakeEngine, tmp_path):
    template = tmp_path / "broken.jinja"
    template.write_text("{% for message in %}")
    engine = make_engine(chat_template=str(template))
    with pytest.raises(ValidationError, match="template"):
        engine.chat([{"role": "user", "content": "hello"}], GREEDY)
    assert engine.generate("still alive", GREEDY)[0].finished


def test_streams(make_engine: MakeEngine):
    engine = make_engine()
    whole = engine.generate(prompt(20), GREEDY)[0]
    outputs = list(engine.generate(prompt(20), GREEDY, stream=True))
    assert len(outputs) == 24
    assert "".join(o.outputs[0].delta_text for o in outputs) == whole.text
    assert sum((o.outputs[0].delta_token_ids for o in outputs), []) == tokens(whole)
    assert outputs[-1].outputs[0].text == whole.text
    assert [o.finished for o in outputs] == [False] * 23 + [True]
    deltas = GREEDY.replace(output_kind=RequestOutputKind.DELTA)
    assert "".join(o.text for o in engine.stream_generate(prompt(20), deltas)) == whole.text
    finals = GREEDY.replace(output_kind=RequestOutputKind.FINAL_ONLY)
    assert [o.text for o in engine.stream_generate(prompt(20), finals)] == [whole.text]


def test_leaving_a_stream_frees(make_engine: MakeEngine):
    engine = make_engine()
    long = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    for _ in engine.generate([prompt(20), prompt(30)], long, stream=True):
        break
    assert is_idle(engine)
    stream = engine.generate(prompt(20), long, stream=True)
    next(stream)
    stream.close()
    assert list(stream) == []
    assert is_idle(engine)


def test_abort(make_engine: MakeEngine):
    engine = make_engine()
    long = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    stream = engine.generate(prompt(20), long, stream=True, request_id="mine")
    next(stream)
    assert engine.abort("mine") == 1
    assert list(stream)[-1].outputs[0].finish_reason == "abort"
    assert engine.abort("mine") == 0
    assert engine.abort(["never", "heard"]) == 0
    assert is_idle(engine)


def test_a_chunk_is_waited_for_though_it_yields_no_token(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
):
    """Else the device gets all chunks of a prompt at once, and an abort cannot take them back."""
    collect = InFlightStep.collect
    is_over: list[bool] = []

    def collect_and_look(step: InFlightStep):
        result = collect(step)
        is_over.extend(hidden_XD.is_ready() for hidden_XD in step._unread)
        return result

    monkeypatch.setattr(InFlightStep, "collect", collect_and_look)
    engine = make_engine(max_num_batched_tokens=32)
    engine.generate([prompt(100)], SamplingParams(max_tokens=1))
    assert is_over == [True, True, True]


def test_deadline(make_engine: MakeEngine):
    engine = make_engine()
    long = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    with pytest.raises(DeadlineExceeded, match="ran past its deadline"):
        engine.generate([prompt(20), prompt(30)], long, timeout=1e-4)
    assert is_idle(engine)


def test_duplicate_id_leaves_its_namesake_alone(make_engine: MakeEngine):
    engine = make_engine()
    long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    first = engine.generate(prompt(20), long, stream=True, request_id="same")
    next(first)
    with pytest.raises(DuplicateRequestError, match="'same' is in use"):
        engine.generate([prompt(5), prompt(6)], long, request_id=["other", "same"])
    assert len(tokens(list(first)[-1])) == 100
    assert is_idle(engine)


def test_full_queue(make_engine: MakeEngine):
    engine = make_engine(max_num_seqs=1, max_waiting_requests=2)
    with pytest.raises(QueueOverflowError, match="max_waiting_requests=2"):
        engine.generate([prompt(5)] * 9, GREEDY)
    assert is_idle(engine)


# The same tokens, however a request is run


@pytest.mark.parametrize("params", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_same_tokens_alone_and_in_any_batch(make_engine: MakeEngine, params: SamplingParams):
    prompts = [prompt(n) for n in (5, 33, 60, 17, 100, 1)]
    engine = make_engine(enable_prefix_caching=False)
    alone = [tokens(engine.generate(p, params)[0]) for p in prompts]
    assert [tokens(o) for o in engine.generate(prompts, params)] == alone
    assert [tokens(o) for o in engine.generate(prompts[::-1], params)] == alone[::-1]


@pytest.mark.parametrize(
    "overrides",
    [
        {"enable_overlap": False},
        {"max_num_batched_tokens": 16},
        {"num_blocks": 14, "preemption_mode": "swap"},
        {"num_blocks": 14, "preemption_mode": "recompute"},
        {"num_blocks": 14, "swap_space_bytes": 0},
        {"block_size": 8},
        {"attention_implementation": "reference"},
        {"attention_implementation": "xla"},
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 4},
    ],
    ids=lambda overrides: "-".join(map(str, overrides.values())),
)
def test_same_tokens_whatever_the_engine(make_engine: MakeEngine, overrides: dict):
    prompts = [prompt(n) for n in (5, 33, 60, 17)]
    params = [GREEDY.replace(max_tokens=40), RANDOM, GREEDY, RANDOM.replace(max_tokens=60)]
    expected = [tokens(o) for o in make_engine().generate(prompts, params)]
    engine = make_engine(**overrides)
    assert [tokens(o) for o in engine.generate(prompts, params)] == expected
    if "num_blocks" in overrides:
        assert engine.get_loads().num_preemptions > 0
    assert is_idle(engine)


@pytest.mark.parametrize("variant", ["wide_head_dim", "llama3_rope"])
def test_same_tokens_by_the_gpu_kernels(make_engine: MakeEngine, variant: str):
    """Interpreted, where there is no GPU: attention, KV write, swap, and shared prefixes."""
    settings = {"num_blocks": 14, "preemption_mode": "swap"}
    prompts = [prompt(n) for n in (5, 33, 60, 17)]
    params = [GREEDY.replace(max_tokens=40), RANDOM, GREEDY, RANDOM.replace(max_tokens=60)]
    engines = [
        make_engine(variant, attention_implementation=name, **settings) for name in ("xla", "gpu")
    ]
    expected, actual = ([tokens(o) for o in e.generate(prompts, params)] for e in engines)
    assert actual == expected


def test_an_implementation_that_cannot_serve_the_model_is_refused(make_engine: MakeEngine):
    with pytest.raises(ConfigError, match="head_dim=8 is no multiple of 16") as caught:
        make_engine(attention_implementation="gpu")
    assert caught.value.parameter == "attention_implementation"


def test_prefix_cache(make_engine: MakeEngine):
    engine = make_engine()
    first = engine.generate(prompt(100), GREEDY)[0]
    again = engine.generate(prompt(100), GREEDY)[0]
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 96)
    longer = engine.generate(prompt(100) + [9, 9, 9], GREEDY)[0]
    assert longer.num_cached_tokens == 96
    salted = engine.generate(prompt(100), GREEDY, cache_salt="other")[0]
    assert salted.num_cached_tokens == 0
    assert tokens(first) == tokens(again) == tokens(salted)
    assert engine.reset_prefix_cache()
    assert engine.generate(prompt(100), GREEDY)[0].num_cached_tokens == 0
    load = engine.get_loads()
    assert load.prefix_cache_hits == 192
    assert is_idle(engine)


# Sampling


def test_several_answers(make_engine: MakeEngine):
    engine = make_engine()
    params = RANDOM.replace(n=3)
    output = engine.generate(prompt(20), params)[0]
    assert [answer.index for answer in output.outputs] == [0, 1, 2]
    assert len({tuple(answer.token_ids) for answer in output.outputs}) == 3
    # The first answer is what the same seed gives alone.
    assert tokens(engine.generate(prompt(20), RANDOM)[0]) == output.outputs[0].token_ids
    streamed = list(engine.generate(prompt(20), params, stream=True))
    assert [a.token_ids for a in streamed[-1].outputs] == [a.token_ids for a in output.outputs]
    assert is_idle(engine)


def test_seeds(make_engine: MakeEngine):
    params = RANDOM.replace(seed=None)
    with_seed = [make_engine(seed=3).generate([prompt(9)] * 3, params) for _ in range(2)]
    runs = [[tuple(tokens(output)) for output in outputs] for outputs in with_seed]
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 3


def test_logprobs_and_prompt_logprobs(make_engine: MakeEngine):
    engine = make_engine(max_num_batched_tokens=64)
    ids = prompt(150)
    params = GREEDY.replace(logprobs=3, prompt_logprobs=2, max_tokens=5)
    output = engine.generate(ids, params)[0]
    answer = output.outputs[0]
    assert answer.logprobs is not None and output.prompt_logprobs is not None
    for token, entry in zip(answer.token_ids, answer.logprobs, strict=True):
        assert entry[token].rank == 1
        assert len(entry) == 3
    assert answer.cumulative_logprob == pytest.approx(
        sum(entry[t].logprob for t, entry in zip(answer.token_ids, answer.logprobs, strict=True))
    )
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == 150
    # The first sampled token's logprobs are those of the same token as part of a longer prompt.
    longer = engine.generate(ids + answer.token_ids, params)[0]
    assert longer.prompt_logprobs is not None
    for token, sampled, prompted in zip(
        answer.token_ids, answer.logprobs, longer.prompt_logprobs[150:], strict=True
    ):
        assert prompted is not None
        assert prompted[token].logprob == pytest.approx(sampled[token].logprob, abs=1e-4)
    for token, entry in zip(ids[1:], output.prompt_logprobs[1:], strict=True):
        assert entry is not None and token in entry
    # A request for prompt logprobs computes its whole prompt.
    assert longer.num_cached_tokens == 0


def test_constraints(make_engine: MakeEngine):
    engine = make_engine()
    base = tokens(engine.generate(prompt(20), GREEDY)[0])
    second = base[1]

    def run(**changes: object) -> list[int]:
        return tokens(engine.generate(prompt(20), GREEDY.replace(**changes))[0])

    assert set(run(allowed_token_ids=[7, 9])) <= {7, 9}
    assert run(logit_bias={11: 100.0}) == [11] * 24
    assert second not in run(logit_bias={second: -100.0})
    assert run(stop_token_ids=[second]) == base[: base.index(second) + 1]
    kept = run(stop_token_ids=[second], min_tokens=10)
    assert len(kept) >= 10 and second not in kept[:9]
    assert len(set(run(repetition_penalty=2.0, frequency_penalty=2.0))) >= len(set(base))
    word = engine.get_tokenizer().decode([second])
    if word.strip():
        assert second not in run(bad_words=[word])


def test_stop_strings(make_engine: MakeEngine):
    engine = make_engine()
    text = engine.generate(prompt(20), GREEDY)[0].text
    stop = text[8:11]
    output = engine.generate(prompt(20), GREEDY.replace(stop=[stop, "never there"]))[0]
    assert output.text == text[: text.index(stop)]
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason == stop
    kept = engine.generate(prompt(20), GREEDY.replace(stop=stop, include_stop_str_in_output=True))[
        0
    ]
    assert kept.text == text[: text.index(stop) + len(stop)]
    assert is_idle(engine)


def test_echo(make_engine: MakeEngine):
    engine = make_engine()
    plain = engine.generate("the quick brown", GREEDY)[0]
    echoed = engine.generate("the quick brown", GREEDY.replace(echo=True))[0]
    assert echoed.text == "the quick brown" + plain.text


def test_truncation(make_engine: MakeEngine):
    engine = make_engine()
    kept = engine.generate(prompt(300), GREEDY.replace(truncate_prompt_tokens=20))[0]
    assert kept.prompt_token_ids == prompt(300)[-20:]
    fitted = engine.generate([3] * 700, GREEDY.replace(truncate_prompt_tokens=-1))[0]
    assert len(fitted.prompt_token_ids) == 511


# Many callers, asynchronous callers


async def test_async_generate(make_engine: MakeEngine):
    engine = make_engine()
    whole = engine.generate(prompt(20), GREEDY)[0]
    outputs = [output async for output in engine.async_generate(prompt(20), GREEDY)]
    assert outputs[-1].text == whole.text
    messages = [{"role": "user", "content": "hello"}]
    chatted = [output async for output in engine.async_chat(messages, GREEDY)]
    assert chatted[-1].text == engine.chat(messages, GREEDY)[0].text
    with pytest.raises(ValidationError):
        async for _ in engine.async_generate([], GREEDY):
            pass


async def test_closing_an_async_stream_frees(make_engine: MakeEngine):
    engine = make_engine()
    long = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    stream = engine.async_generate(prompt(20), long)
    await anext(stream)
    await stream.aclose()
    assert is_idle(engine)


def test_many_threads(make_engine: MakeEngine):
    engine = make_engine()
    expected = [tokens(engine.generate(prompt(n), GREEDY)[0]) for n in range(1, 13)]
    found: dict[int, list[int]] = {}

    def ask(n: int) -> None:
        found[n] = tokens(engine.generate(prompt(n), GREEDY)[0])

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(1, 13)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[n] for n in range(1, 13)] == expected
    assert is_idle(engine)


# When things go wrong


def test_a_failed_step_ends_its_requests_and_nothing_else(make_engine: MakeEngine):
    engine = make_engine()
    expected = tokens(engine.generate(prompt(20), GREEDY)[0])
    run, calls = engine._runners[0].programs.forward, 0

    def fails_once(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise RuntimeError("the device is on fire")
        return run(*arguments)

    engine._runners[0].programs.forward = fails_once
    with pytest.raises(GenerationError, match="on fire"):
        engine.generate([prompt(20), prompt(7)], GREEDY)
    assert is_idle(engine)
    assert engine.is_healthy
    assert tokens(engine.generate(prompt(20), GREEDY)[0]) == expected


def test_an_engine_that_keeps_failing_is_dead(make_engine: MakeEngine):
    engine = make_engine()

    def fails(*arguments: object) -> object:
        raise RuntimeError("the device is gone")

    engine._runners[0].programs.forward = fails
    for error in (GenerationError, GenerationError, EngineDeadError, EngineDeadError):
        with pytest.raises(error):
            engine.generate(prompt(20), GREEDY)
    assert not engine.is_healthy
    engine.shutdown()


def test_shutdown(make_engine: MakeEngine):
    engine = make_engine()
    long = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    stream = engine.generate(prompt(20), long, stream=True)
    next(stream)
    engine.shutdown()
    engine.shutdown()
    assert list(stream)[-1].outputs[0].finish_reason == "abort"
    with pytest.raises(EngineDeadError, match="shut down"):
        engine.generate("x")
    assert engine.abort("x") == 0
