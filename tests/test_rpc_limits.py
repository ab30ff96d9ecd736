"""Requests that are far too large are refused before anything of them is copied or worked on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from flowkv_jax.engine.sampling_state import MAX_BAD_WORD_CHARACTERS, tokenize_bad_words
from flowkv_jax.errors import ValidationError
from flowkv_jax.rpc import answering, limits, servicer, wire
from flowkv_jax.rpc.client import Client
from flowkv_jax.rpc.client_stream import _Readers
from flowkv_jax.rpc.flowkv.v1 import flowkv_pb2 as pb
from tests.fake_engine import FakeEngine, serving, stub_of


async def refusal_of(call: Any) -> str:
    """What an INVALID_ARGUMENT says; `call` is of either kind."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (call.read() if hasattr(call, "read") else call)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return str(caught.value.details())


async def test_lists_beyond_their_bound_are_refused_by_name() -> None:
    turn = pb.ChatMessage(role="user", content="hi")
    async with serving(FakeEngine()) as server, stub_of(server) as stub:
        ids = [1] * (answering.MIN_PROMPT_IDS_READ + 1)
        calls = {
            "request_ids": stub.Abort(
                pb.AbortRequest(request_ids=map(str, range(servicer.MAX_ABORT_IDS + 1)))
            ),
            "messages": stub.Chat(pb.ChatRequest(messages=[turn] * (limits.MAX_MESSAGES + 1))),
            "token_ids": stub.Detokenize(
                pb.DetokenizeRequest(token_ids=[1] * (limits.MAX_DETOKENIZE_IDS + 1))
            ),
            "prompt_token_ids": stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids))),
        }
        for name, call in calls.items():
            assert (await refusal_of(call)).startswith(f"{name} has ")


async def test_of_ids_to_be_truncated_only_the_end_is_read() -> None:
    engine = FakeEngine()
    async with serving(engine) as server, stub_of(server) as stub:
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[1, *[2] * answering.MIN_PROMPT_IDS_READ]),
            sampling_params=pb.SamplingParams(truncate_prompt_tokens=-1, max_tokens=1),
        )
        assert await stub.Generate(request).read() is not grpc.aio.EOF
    assert engine.received[0].prompt == [2] * answering.MIN_PROMPT_IDS_READ


def test_lists_of_sampling_parameters_are_bounded() -> None:
    ids = pb.TokenIds(ids=[1] * ((1 << 18) + 1))
    for params in (
        pb.SamplingParams(allowed_token_ids=ids),
        pb.SamplingParams(stop_token_ids=ids.ids),
    ):
        with pytest.raises(ValidationError, match="entries; at most"):
            wire.sampling_params_from_wire(params)


def test_long_bad_words_are_refused_before_they_are_tokenised() -> None:
    def encode(text: str) -> list[int]:
        raise AssertionError(f"{len(text)} characters were tokenised")

    with pytest.raises(ValidationError, match="bad_words"):
        tokenize_bad_words(["x" * (MAX_BAD_WORD_CHARACTERS + 1)], encode)


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.chat(5),
        lambda client: client.chat("hello"),
        lambda client: client.chat([5]),
        lambda client: client.chat([[5]]),
        lambda client: client.chat([{"role": "user", "content": ["hi"]}]),
        lambda client: client.generate("hello", cache_salt=["salt"]),
        lambda client: client.generate([object()]),
        lambda client: client.abort(5),
        lambda client: client.abort(None),
    ],
)
def test_a_client_refuses_arguments_of_a_wrong_kind(call: Callable[[Client], object]) -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(ValidationError):
        call(client)


def test_a_stream_may_be_collected_while_a_call_is_opened() -> None:
    readers = _Readers([], None, ())
    with readers._lock:
        readers.cancel()
    assert readers._next_call() is None
