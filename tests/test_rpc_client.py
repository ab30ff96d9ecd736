"""`Client` in the Engine's shape, against a real server. It blocks, so it runs on threads."""

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest

from flowkv_jax import errors
from flowkv_jax.errors import (
    ClientError,
    DeadlineExceeded,
    DuplicateRequestError,
    EngineDeadError,
    FlowKVError,
    GenerationError,
    NotFoundError,
    QueueOverflowError,
    RequestCancelled,
    RetryableRequestError,
    UnprocessableError,
    ValidationError,
)
from flowkv_jax.outputs import Logprob, RequestOutput
from flowkv_jax.rpc.client import Client
from flowkv_jax.rpc.client_stream import MAX_CONCURRENT_CALLS
from flowkv_jax.rpc.transport import channel_options
from flowkv_jax.sampling_params import RequestOutputKind, SamplingParams
from tests.fake_engine import LOAD, METRICS, MODEL_INFO, FakeEngine, serving


async def with_client(engine: FakeEngine, work: Callable[[Client], Any], **settings: Any) -> Any:
    """Run `work(client)` on a thread while this loop serves."""
    async with serving(engine, **settings) as server:

        def run() -> Any:
            with Client(server.address) as client:
                return work(client)

        return await asyncio.to_thread(run)


def every_class(root: type[FlowKVError] = FlowKVError) -> list[type[FlowKVError]]:
    """The tree of `flowkv_jax.errors`, root first."""
    below = [cls for child in root.__subclasses__() for cls in every_class(child)]
    return [cls for cls in (root, *below) if cls.__module__ == errors.__name__]


@pytest.mark.parametrize("cls", every_class())
@pytest.mark.parametrize("num_tokens_before", [0, 1])
async def test_every_error_comes_back_as_itself(
    cls: type[FlowKVError], num_tokens_before: int
) -> None:
    message = f"the {cls.__name__} said: naïve ✓"
    engine = FakeEngine()
    if issubclass(cls, ValidationError):
        engine.failures[num_tokens_before] = cls(message, parameter="top_p", value=3)
    elif issubclass(cls, RetryableRequestError):
        engine.failures[num_tokens_before] = cls(message, retry_after_s=1.25)
    else:
        engine.failures[num_tokens_before] = cls(message)
    with pytest.raises(FlowKVError) as caught:
        await with_client(engine, lambda client: client.generate("hi", stream=False))
    assert type(caught.value) is cls
    assert str(caught.value) == message
    if isinstance(caught.value, ValidationError):
        assert caught.value.parameter == "top_p"
    if isinstance(caught.value, RetryableRequestError):
        assert caught.value.retry_after_s == 1.25


async def test_a_full_queue_always_says_when_to_come_back() -> None:
    engine = FakeEngine()
    engine.failures[0] = QueueOverflowError("full")
    with pytest.raises(QueueOverflowError) as caught:
        await with_client(engine, lambda client: client.generate("hi"))
    assert caught.value.retry_after_s is not None


async def test_a_bug_is_a_server_error() -> None:
    engine = FakeEngine()
    engine.failures[0] = ZeroDivisionError("inside")
    with pytest.raises(errors.ServerError, match="internal error"):
        await with_client(engine, lambda client: client.generate("hi"))


async def test_a_long_message_is_cut_to_fit_the_headers() -> None:
    engine = FakeEngine()
    engine.failures[0] = ValidationError("😀" * 5000, parameter="x" * 5000)
    with pytest.raises(ValidationError) as caught:
        await with_client(engine, lambda client: client.generate("hi"))
    assert str(caught.value).startswith("😀" * 200)
    assert str(caught.value).endswith("...")


async def test_one_prompt_gives_a_list_of_one() -> None:
    engine = FakeEngine()
    params = SamplingParams(max_tokens=3, logprobs=0, prompt_logprobs=0)
    [output] = await with_client(engine, lambda c: c.generate("hi", params, request_id="r"))
    assert output == RequestOutput(
        request_id="r",
        prompt="hi",
        prompt_token_ids=[1, ord("h"), ord("i")],
        outputs=output.outputs,
        finished=True,
        prompt_logprobs=[None, {ord("h"): Logprob(-1.0, 2)}, {ord("i"): Logprob(-1.0, 2)}],
        num_cached_tokens=1,
        metrics=METRICS,
    )
    [answer] = output.outputs
    assert (answer.text, answer.token_ids) == ("t0 t1 t2 ", [0, 1, 2])
    assert (answer.delta_text, answer.delta_token_ids) == ("t0 t1 t2 ", [0, 1, 2])
    assert answer.logprobs == [{i: Logprob(-0.5, 1, f"t{i} ")} for i in range(3)]
    assert answer.cumulative_logprob == -1.5
    assert (answer.finish_reason, answer.stop_reason) == ("length", None)


async def test_prompts_of_every_kind_in_order() -> None:
    engine = FakeEngine()
    prompts = ["a", [7, 8], {"prompt": "b"}, {"prompt_token_ids": [9]}]
    params = [SamplingParams(max_tokens=n) for n in (4, 1, 3, 2)]
    outputs = await with_client(
        engine,
        lambda c: c.generate(
            prompts, params, request_id=list("wxyz"), priority=[4, 3, 2, 1], cache_salt="s"
        ),
    )
    assert [o.request_id for o in outputs] == ["w", "x", "y", "z"]
    assert [len(o.outputs[0].token_ids) for o in outputs] == [4, 1, 3, 2]
    received = {r.request_id: (r.prompt, r.priority, r.cache_salt) for r in engine.received}
    assert received == {
        "w": ("a", 4, "s"),
        "x": ([7, 8], 3, "s"),
        "y": ("b", 2, "s"),
        "z": ([9], 1, "s"),
    }


async def test_more_prompts_than_calls_at_once() -> None:
    engine = FakeEngine()
    count = MAX_CONCURRENT_CALLS + 40
    prompts = [[index] * 2000 for index in range(count)]
    outputs = await with_client(engine, lambda c: c.generate(prompts, {"max_tokens": 2}))
    assert [o.prompt_token_ids[0] for o in outputs] == list(range(count))


async def test_token_ids_alone_are_one_prompt() -> None:
    engine = FakeEngine()
    assert len(await with_client(engine, lambda c: c.generate([1, 2, 3]))) == 1
    assert engine.received[0].prompt == [1, 2, 3]


async def test_defaults_are_the_servers() -> None:
    engine = FakeEngine()
    await with_client(engine, lambda c: c.generate("a"))
    await with_client(engine, lambda c: c.chat([{"role": "user", "content": "a"}]))
    assert [r.params.max_tokens for r in engine.received] == [16, None]
    assert engine.received[0].params.given_fields == {"output_kind"}


async def test_chat_takes_one_conversation_or_several() -> None:
    engine = FakeEngine()
    turn = {"role": "user", "content": "hello"}
    one = await with_client(engine, lambda c: c.chat([turn], {"max_tokens": 1}))
    two = await with_client(engine, lambda c: c.chat([[turn], [turn, turn]], {"max_tokens": 1}))
    assert (len(one), len(two)) == (1, 2)
    assert sorted(len(messages) for messages, _ in engine.rendered) == [1, 1, 2]


@pytest.mark.parametrize(
    "work",
    [
        lambda c: c.generate([]),
        lambda c: c.generate(None),
        lambda c: c.generate(["a", 3.5]),
        lambda c: c.generate({"prompt": "a", "prompt_token_ids": [1]}),
        lambda c: c.generate({"text": "a"}),
        lambda c: c.generate([2**40]),
        lambda c: c.generate("\ud800"),
        lambda c: c.generate(["a", "b"], [SamplingParams()]),
        lambda c: c.generate(["a", "b"], request_id="only-one"),
        lambda c: c.generate(["a", "b"], request_id=["same", "same"]),
        lambda c: c.generate(["a", "b"], priority=[1]),
        lambda c: c.generate("a", priority=2**40),
        lambda c: c.generate("a", SamplingParams(stop_token_ids=[2**40])),
        lambda c: c.generate("a", {"temperature": 3.0}),
        lambda c: c.generate("a", {"tempreature": 1.0}),
        lambda c: c.generate("a", 7),
        lambda c: c.generate("a", timeout=0),
        lambda c: c.generate("a", request_id=7),
        lambda c: c.chat([]),
        lambda c: c.chat([{"role": "user"}]),
        lambda c: c.chat([{"role": "user", "content": 5}]),
        lambda c: c.tokenize(b"bytes"),
        lambda c: c.detokenize([-1]),
    ],
)
async def test_bad_arguments(work: Callable[[Client], Any]) -> None:
    engine = FakeEngine()
    with pytest.raises(ValidationError) as caught:
        await with_client(engine, work)
    assert caught.value.parameter is not None
    assert engine.received == []


@pytest.mark.parametrize("kind", RequestOutputKind)
@pytest.mark.parametrize("n", [1, 3])
async def test_streams_of_every_kind(kind: RequestOutputKind, n: int) -> None:
    params = SamplingParams(max_tokens=4, n=n, output_kind=kind, logprobs=0)
    outputs = await with_client(FakeEngine(), lambda c: list(c.generate("hi", params, stream=True)))
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    for index in range(n):
        answers = [a for o in outputs for a in o.outputs if a.index == index]
        assert "".join(a.delta_text for a in answers) == "t0 t1 t2 t3 "
        assert [i for a in answers for i in a.delta_token_ids] == [0, 1, 2, 3]
        assert answers[-1].finish_reason == "length"
        if kind is RequestOutputKind.DELTA:
            assert all(a.text == a.delta_text for a in answers)
            assert [p for a in answers for p in a.logprobs] == [
                {i: Logprob(-0.5, 1, f"t{i} ")} for i in range(4)
            ]
        else:
            assert answers[-1].text == "t0 t1 t2 t3 "
            assert len(answers[-1].logprobs) == 4
            assert all(len(a.logprobs) == len(a.token_ids) for a in answers)
    if kind is RequestOutputKind.FINAL_ONLY:
        assert len(outputs) == 1


async def test_several_streams_are_interleaved() -> None:
    engine = FakeEngine()
    pause = engine.pause_before(1)
    loop = asyncio.get_running_loop()

    def work(client: Client) -> list[RequestOutput]:
        stream = client.stream_generate(
            ["a", "b", "c"], {"max_tokens": 3, "output_kind": "delta"}, request_id=list("abc")
        )
        begun = [next(stream) for _ in range(3)]
        loop.call_soon_threadsafe(pause.released.set)
        return [*begun, *stream]

    outputs = await with_client(engine, work)
    assert {o.request_id for o in outputs[:3]} == {"a", "b", "c"}
    for name in "abc":
        mine = [o for o in outputs if o.request_id == name]
        assert "".join(o.outputs[0].text for o in mine) == "t0 t1 t2 "
        assert mine[-1].finished


async def leave(engine: FakeEngine, work: Callable[[Client], None]) -> None:
    """`work` opens a stream that waits before token 1, and leaves; then nothing may be live."""
    engine.pause_before(1)
    async with serving(engine) as server:
        with Client(server.address) as client:
            await asyncio.to_thread(work, client)
            await engine.wait_until_idle()


@pytest.mark.parametrize("prompts", ["one", ["one", "two"]])
async def test_break_cancels(prompts: Any) -> None:
    def work(client: Client) -> None:
        for _ in client.generate(prompts, stream=True):
            break
        gc.collect()

    await leave(FakeEngine(), work)


@pytest.mark.parametrize("prompts", ["one", ["one", "two"]])
async def test_close_cancels_and_ends_the_stream(prompts: Any) -> None:
    def work(client: Client) -> None:
        with client.generate(prompts, stream=True) as stream:
            next(stream)
        stream.close()
        assert list(stream) == []

    await leave(FakeEngine(), work)


async def test_closing_the_client_ends_its_streams() -> None:
    def work(client: Client) -> None:
        stream = client.generate("one", stream=True)
        next(stream)
        client.close()
        with pytest.raises(RequestCancelled):
            next(stream)
        for call in (client.model_info, lambda: client.generate(["a", "b"], stream=True)):
            with pytest.raises(ClientError, match="closed"):
                list(call())

    await leave(FakeEngine(), work)


async def test_one_failure_of_a_batch_cancels_the_others() -> None:
    engine = FakeEngine()
    engine.pause_before(5)
    engine.failures[1] = GenerationError("first to fail")

    def work(client: Client) -> None:
        with pytest.raises(GenerationError):
            client.generate(["a", "b"], [{"max_tokens": 3}, {"max_tokens": 9}])
        with pytest.raises(GenerationError):
            list(client.generate(["a", "b"], stream=True))

    await with_client(engine, work)
    await engine.wait_until_idle()


async def test_timeout_of_a_call_and_of_the_client() -> None:
    engine = FakeEngine()
    engine.pause_before(1)
    async with serving(engine) as server:

        def work() -> None:
            with Client(server.address) as client, pytest.raises(DeadlineExceeded):
                client.generate("a", timeout=0.3)
            with Client(server.address, timeout=0.3) as client, pytest.raises(DeadlineExceeded):
                list(client.generate(["a", "b"], stream=True))

        await asyncio.to_thread(work)


async def test_abort_from_elsewhere() -> None:
    engine = FakeEngine()
    engine.pause_before(1)

    def work(client: Client) -> list[RequestOutput]:
        stream = client.generate("a", stream=True, request_id="mine")
        first = next(stream)
        with pytest.raises(DuplicateRequestError):
            client.generate("b", request_id="mine")
        assert client.abort("mine") == 1
        rest = list(stream)
        with pytest.raises(NotFoundError):
            client.abort(["mine", "never-was"])
        return [first, *rest]

    outputs = await with_client(engine, work)
    assert outputs[-1].outputs[0].finish_reason == "abort"


async def test_unary_calls() -> None:
    def work(client: Client) -> None:
        assert client.model_info() == MODEL_INFO
        assert client.get_loads() == LOAD
        assert client.tokenize("ab") == [1, 97, 98]
        assert client.tokenize("ab", add_special_tokens=False) == [97, 98]
        assert client.detokenize([1, 97]) == "a"
        assert client.detokenize([1, 97], skip_special_tokens=False) == "\x01a"
        assert client.health() is True

    await with_client(FakeEngine(), work)


async def test_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = await with_client(
        FakeEngine(), lambda c: c.generate(["a", "b"], {"max_tokens": 1}, use_tqdm=True)
    )
    assert len(outputs) == 2
    assert "requests" in capsys.readouterr().err


async def test_a_message_that_is_too_large() -> None:
    with pytest.raises(UnprocessableError, match="larger than max"):
        await with_client(FakeEngine(), lambda c: c.generate("x" * 10_000), max_message_bytes=4096)


async def test_a_dead_engine() -> None:
    engine = FakeEngine()
    engine.is_healthy = False
    with pytest.raises(EngineDeadError):
        await with_client(engine, lambda c: c.generate("a"))


async def test_a_server_on_this_machine_is_asked_without_a_proxy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("grpc_proxy", "http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    (answer,) = await with_client(FakeEngine(), lambda client: client.generate("hi"))
    assert answer.finished


@pytest.mark.parametrize(
    ("target", "is_proxied"),
    [
        ("127.0.0.1:50051", 0),
        ("127.8.8.8:1", 0),
        ("localhost:50051", 0),
        ("[::1]:50051", 0),
        ("10.0.0.5:50051", 1),
        ("localhost.example:50051", 1),
        ("flowkv:50051", 1),
        ("[2001:db8::1]:50051", 1),
    ],
)
def test_other_machines_may_need_a_proxy(target: str, is_proxied: int) -> None:
    assert dict(channel_options(target, 1 << 20))["grpc.enable_http_proxy"] == is_proxied


def test_no_server() -> None:
    with (
        Client("127.0.0.1:1") as client,
        pytest.raises(RetryableRequestError, match="127.0.0.1:1"),
    ):
        client.generate("a")


async def test_unavailable_is_retried_only_before_the_first_message() -> None:
    engine = FakeEngine()
    engine.failures[0] = RetryableRequestError("not yet")
    original = engine.async_generate

    def failing_once(*args: Any, **kwargs: Any) -> Any:
        if engine.received:
            engine.failures.clear()
        return original(*args, **kwargs)

    engine.async_generate = failing_once  # type: ignore[method-assign]
    [output] = await with_client(engine, lambda c: c.generate("a", {"max_tokens": 2}))
    assert output.text == "t0 t1 "
    assert len(engine.received) == 2

    engine = FakeEngine()
    engine.failures[1] = RetryableRequestError("lost in mid-stream")
    with pytest.raises(RetryableRequestError, match="mid-stream"):
        await with_client(engine, lambda c: list(c.generate("a", stream=True)))
    assert len(engine.received) == 1
