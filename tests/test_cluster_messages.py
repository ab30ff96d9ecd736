"""Sequences, their news, and errors survive the way between two processes."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowkv_jax import errors
from flowkv_jax.cluster.error_wire import MAX_TEXT, WireError, error_from_wire, error_to_wire
from flowkv_jax.cluster.facts import differences, named_facts
from flowkv_jax.cluster.messages import (
    Drain,
    Expelled,
    Join,
    Message,
    Peer,
    Peers,
    Ping,
    Redirect,
    Refused,
    Release,
    Report,
    SetRole,
    Start,
    Stop,
    Updates,
    Welcome,
    decode_at_front,
    decode_at_worker,
    encode,
)
from flowkv_jax.cluster.node_port import SequenceKey, StopOrder
from flowkv_jax.cluster.sequence_wire import (
    WireParams,
    WireSpecs,
    specs_from_wire,
    specs_to_wire,
    updates_from_wire,
    updates_to_wire,
)
from flowkv_jax.controller.role import Role
from flowkv_jax.controller.routing import NoNodeAvailable
from flowkv_jax.controller.snapshot import NodeReport
from flowkv_jax.engine.output_processor import LogprobsRow
from flowkv_jax.errors import FlowKVError, GenerationError, ValidationError
from flowkv_jax.sampling_params import RequestOutputKind, SamplingParams
from flowkv_jax.sequence import HandoffReport, PromptLogprobs, SequenceSpec, SequenceUpdate
from flowkv_jax.structured_outputs import StructuredOutputs
from tests.cluster_fakes import VERSION, load, model_facts, node_facts, spec
from transfer.errors import ProtocolError

HERE_S, THERE_S = 1000.0, 5.0
"""Now, on the clocks of two hosts."""

tokens = st.lists(st.integers(0, 2**31 - 1), max_size=5)
names = st.text(max_size=20)
times = st.none() | st.integers(0, 900).map(float)
rows = st.builds(
    LogprobsRow,
    st.floats(allow_nan=False),
    st.integers(1, 1000),
    tokens.map(tuple),
    st.lists(st.floats(allow_nan=False), max_size=3).map(tuple),
)
updates = st.builds(
    SequenceUpdate,
    sequence_id=names,
    attempt=st.integers(0, 99),
    start=st.integers(0, 10**6),
    token_ids=tokens.map(tuple),
    logprobs=st.none() | st.lists(rows, max_size=2).map(tuple),
    prompt_logprobs=st.none()
    | st.builds(PromptLogprobs, st.integers(0, 9), tokens.map(tuple), st.tuples(rows)),
    finish_reason=st.sampled_from([None, "stop", "length", "abort", "error"]),
    stop_reason=st.none() | st.integers(0, 9) | names,
    num_cached_tokens=st.integers(0, 9),
    num_preemptions=st.integers(0, 9),
    scheduled_s=times,
    handoff_error=st.none() | names,
    decode_node=st.none() | names,
)
specs = st.builds(
    SequenceSpec,
    sequence_id=names,
    prompt_token_ids=tokens,
    sampling_params=st.just(SamplingParams(temperature=0.7)),
    seed=st.integers(0, 2**64 - 1),
    max_total_tokens=st.integers(0, 99),
    arrival_s=st.integers(0, 900).map(float),
    attempt=st.integers(0, 9),
    output_token_ids=tokens.map(tuple),
    deadline_s=times,
    priority=st.integers(-9, 9),
    cache_salt=st.none() | names,
    bad_word_ids=st.lists(tokens.map(tuple), max_size=2).map(tuple),
    decode_node=st.sampled_from([None, "decode-1"]),
)


def over_the_wire(given_specs: list[SequenceSpec]) -> list[SequenceSpec]:
    message = decode_at_worker(encode(Start(specs_to_wire(given_specs, HERE_S))))
    assert isinstance(message, Start)
    return specs_from_wire(message.sequences, THERE_S)


class TestSequences:
    @given(st.lists(updates, max_size=3))
    def test_updates(self, sent: list[SequenceUpdate]) -> None:
        message = decode_at_front(encode(Updates(updates_to_wire(sent, HERE_S))))
        assert isinstance(message, Updates)
        got = updates_from_wire(message.updates, HERE_S)
        assert got == sent
        later = updates_from_wire(message.updates, THERE_S)
        for update, original in zip(later, sent, strict=True):
            if original.scheduled_s is not None:
                assert update.scheduled_s == original.scheduled_s - HERE_S + THERE_S

    @given(st.lists(specs, max_size=3))
    def test_specs(self, sent: list[SequenceSpec]) -> None:
        shift_s = THERE_S - HERE_S
        for got, original in zip(over_the_wire(sent), sent, strict=True):
            deadline_s = original.deadline_s
            assert got == dataclasses.replace(
                original,
                arrival_s=original.arrival_s + shift_s,
                deadline_s=None if deadline_s is None else deadline_s + shift_s,
            )

    def test_a_handoff_report(self) -> None:
        report = HandoffReport(
            "p", "d", "shared_memory", "shm", 1, 1, 4096, 8, 2, 0.5, 0.001, 0.002
        )
        sent = [SequenceUpdate(sequence_id="s", attempt=1, handoff=report)]
        message = decode_at_front(encode(Updates(updates_to_wire(sent, HERE_S))))
        assert isinstance(message, Updates)
        assert updates_from_wire(message.updates, HERE_S) == sent

    def test_what_the_answers_of_a_request_share_is_sent_once(self) -> None:
        first = spec("r", 20_000, 20_010)
        many = [dataclasses.replace(first, sequence_id=f"r#{i}", seed=i) for i in range(8)]
        alone = len(encode(Start(specs_to_wire([first], HERE_S))))
        assert len(encode(Start(specs_to_wire(many, HERE_S)))) < alone + 8 * 64
        got = over_the_wire(many)
        assert [s.seed for s in got] == list(range(8))
        assert all(s.prompt_token_ids is got[0].prompt_token_ids for s in got)

    def test_an_index_that_leads_nowhere(self) -> None:
        wire = specs_to_wire([spec()], HERE_S)
        with pytest.raises(ValidationError, match="without its prompt"):
            specs_from_wire(WireSpecs([], wire.params, wire.specs), THERE_S)


class TestSamplingParams:
    @pytest.mark.parametrize(
        "params",
        [
            SamplingParams(),
            SamplingParams(temperature=1.0, seed=None, max_tokens=None),
            SamplingParams(n=3, temperature=0.5, output_kind=RequestOutputKind.DELTA, stop=["a"]),
            SamplingParams(top_k=4).with_defaults({"temperature": 0.6, "top_p": 0.9}),
            SamplingParams(top_k=4).replace(max_tokens=None),
            SamplingParams(structured_outputs=StructuredOutputs(json={"type": "object"})),
            SamplingParams(structured_outputs=StructuredOutputs(choice=["a", "b"])),
        ],
    )
    def test_equal_and_given_by_the_same_caller(self, params: SamplingParams) -> None:
        (got,) = over_the_wire([spec(sampling_params=params)])
        assert got.sampling_params == params
        assert got.sampling_params.given_fields == params.given_fields

    def test_numbers_of_other_libraries(self) -> None:
        params = SamplingParams(
            temperature=np.float32(0.5),
            stop_token_ids=(np.int64(3), 4),
            logit_bias={np.int32(7): np.float64(1.5)},  # type: ignore[dict-item]
        )
        (got,) = over_the_wire([spec(sampling_params=params)])
        assert got.sampling_params.temperature == 0.5
        assert got.sampling_params.stop_ids == {3, 4}
        assert got.sampling_params.bias == {7: 1.5}

    @pytest.mark.parametrize(
        "wire",
        [
            WireParams({"temperature": 99.0}),
            WireParams({"no_such_thing": 1}),
            WireParams({"output_kind": "sideways"}),
            WireParams({"structured_outputs": {"regex": 5}}),
            WireParams({}, {"top_p": 7.0}),
        ],
    )
    def test_what_cannot_be_is_a_validation_error(self, wire: WireParams) -> None:
        sent = specs_to_wire([spec()], HERE_S)
        with pytest.raises(ValidationError):
            specs_from_wire(WireSpecs(sent.prompts, [wire], sent.specs), THERE_S)


class TestErrors:
    def travelled(self, error: BaseException) -> FlowKVError:
        wire = error_to_wire(error)
        return error_from_wire(msgspec.msgpack.decode(msgspec.msgpack.encode(wire), type=WireError))

    def test_the_whole_tree(self) -> None:
        classes = [
            cls
            for cls in vars(errors).values()
            if isinstance(cls, type) and issubclass(cls, FlowKVError)
        ]
        assert len(classes) > 15
        for cls in classes:
            got = self.travelled(cls("what went wrong"))
            assert type(got) is cls and str(got) == "what went wrong"

    def test_what_they_carry(self) -> None:
        got = self.travelled(ValidationError("bad", parameter="top_p", value=object()))
        assert isinstance(got, ValidationError) and got.parameter == "top_p"
        later = self.travelled(errors.QueueOverflowError("full", retry_after_s=2.5))
        assert isinstance(later, errors.QueueOverflowError) and later.retry_after_s == 2.5

    def test_a_refinement_is_what_it_refines(self) -> None:
        assert type(self.travelled(NoNodeAvailable("none"))) is errors.RetryableRequestError

    def test_anything_else_is_a_generation_error(self) -> None:
        got = self.travelled(ZeroDivisionError("by zero"))
        assert type(got) is GenerationError and str(got) == "ZeroDivisionError: by zero"
        assert type(error_from_wire(WireError("SystemExit", "x"))) is GenerationError
        assert type(error_from_wire(WireError("ValueError", "x"))) is GenerationError

    def test_long_texts_are_cut(self) -> None:
        assert len(str(self.travelled(GenerationError("x" * 10**6)))) == MAX_TEXT


PEER = Peer("p", 3, ("10.0.0.1", 7))
TO_WORKER: list[Message] = [
    Welcome("prefill-0", 4, Role.PREFILL, 3.0, 0.1, [PEER]),
    Refused("no", True),
    Expelled("silent"),
    Stop([StopOrder(SequenceKey("s", 1), "stop", "END"), StopOrder(SequenceKey("t", 2), "abort")]),
    Redirect(SequenceKey("s", 1), None),
    Release("p"),
    Peers([PEER], [Peer("q", 1, None)]),
    SetRole(Role.DECODE),
    Drain(1.5),
    Ping(),
]


class TestMessages:
    @pytest.mark.parametrize("message", TO_WORKER, ids=lambda m: type(m).__name__)
    def test_to_the_worker(self, message: Message) -> None:
        assert decode_at_worker(encode(message)) == message
        with pytest.raises(ProtocolError):
            decode_at_front(encode(message))

    def test_to_the_front(self) -> None:
        join = Join(1, VERSION, "i", "n", True, 0, Role.HYBRID, model_facts(), node_facts(pid=7))
        report = Report(NodeReport(load=load(3), added_blocks=(b"x" * 32,), decode_step_s=0.01))
        for message in (join, report):
            assert decode_at_front(encode(message)) == message
            with pytest.raises(ProtocolError):
                decode_at_worker(encode(message))

    def test_join_may_grow_at_its_end(self) -> None:
        join = Join(2, "9", "i", "n", True, 0, Role.HYBRID, model_facts(), node_facts())
        longer: list[Any] = msgspec.msgpack.decode(encode(join))
        assert decode_at_front(msgspec.msgpack.encode([*longer, "news"])) == join

    @pytest.mark.parametrize(
        "layout", [{"block_size": 0}, {"num_layers": -1}, {"dtype_bytes": "four"}]
    )
    def test_a_layout_that_cannot_be(self, layout: dict[str, Any]) -> None:
        join = Join(1, VERSION, "i", "n", True, 0, Role.HYBRID, model_facts(), node_facts())
        fields: list[Any] = msgspec.msgpack.decode(encode(join))
        fields[8][3] |= layout
        with pytest.raises(ProtocolError):
            decode_at_front(msgspec.msgpack.encode(fields))

    @given(st.binary(max_size=200))
    def test_noise_is_a_protocol_error_or_a_message(self, body: bytes) -> None:
        for decode in (decode_at_front, decode_at_worker):
            with contextlib.suppress(ProtocolError):
                assert isinstance(decode(body), Message)


def test_facts_that_are_equal_differ_in_nothing() -> None:
    assert differences(named_facts(model_facts()), model_facts()) == []
