"""Two nodes and the wire between them: one test for each rule of the protocol."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import pytest

from flowkv_jax.cluster.node_port import SequenceKey, StopOrder
from flowkv_jax.cluster.sequence_wire import specs_to_wire
from flowkv_jax.config import SchedulerConfig
from flowkv_jax.errors import DeadlineExceeded, GenerationError, RetryableRequestError
from flowkv_jax.handoff import messages
from flowkv_jax.request import RequestStatus
from flowkv_jax.sequence import SequenceSpec, SequenceUpdate
from tests.handoff_nodes import HANDOFF_WAIT_S, StillNode, Wire
from tests.scripted_nodes import new_caller, right_answer


class Pair:
    """P prefills, D decodes; `said` is what both told whoever dispatches, `orders` what that
    answers next."""

    def __init__(self, *, seats: int = 4, num_blocks: int = 16) -> None:
        self.wire = Wire()
        self.said: list[tuple[str, SequenceUpdate]] = []
        self.orders: list[StopOrder] = []
        config = SchedulerConfig(max_num_seqs=seats, max_num_batched_tokens=12)
        self.p = StillNode("P", self.wire, self.hear, scheduler=config)
        self.d = StillNode("D", self.wire, self.hear, scheduler=config, num_blocks=num_blocks)

    def hear(self, node: str, updates: Sequence[SequenceUpdate]) -> list[StopOrder]:
        self.said += [(node, update) for update in updates]
        orders, self.orders = self.orders, []
        return orders

    def start(self, name: str = "a", at: StillNode | None = None, **fields: object) -> SequenceSpec:
        """Start a sequence at P that is to go to D."""
        spec = replace(spec_of(name), decode_node="D", **fields)  # type: ignore[arg-type]
        node = at or self.p
        started = node.start([spec])
        node.hear()
        started.result(0)
        return spec

    def letters(self, *, to: str) -> None:
        pair = ("D", "P") if to == "P" else ("P", "D")
        while self.wire.letters.get(pair):
            self.wire.deliver(pair)
        self.wire.nodes[to].hear()

    def status(self, node: StillNode, spec: SequenceSpec) -> RequestStatus | None:
        request = node.plan.get(spec.sequence_id)
        return None if request is None else request.status

    def run(self, turns: int = 60) -> None:
        for _ in range(turns):
            for node in (self.p, self.d):
                node.turn()
            for to in "PD":
                self.letters(to=to)
            for transfer in list(self.wire.transfers):
                transfer.finish()
                transfer.acknowledge()
            self.wire.check()

    def tokens(self, spec: SequenceSpec) -> list[int]:
        """In order, wherever they came from."""
        found: dict[int, int] = {}
        for _, update in self.said:
            if update.sequence_id == spec.sequence_id:
                found |= {update.start + i: token for i, token in enumerate(update.token_ids)}
        assert sorted(found) == list(range(len(found)))
        return [found[i] for i in range(len(found))]

    def troubles(self) -> list[tuple[str, str]]:
        return [(node, u.handoff_error) for node, u in self.said if u.handoff_error is not None]

    def check_empty(self) -> None:
        self.p.turn()
        self.d.turn()
        self.p.check_empty()
        self.d.check_empty()


def spec_of(name: str, length: int = 5, max_tokens: int = 8, seed: int = 2) -> SequenceSpec:
    caller = new_caller(name, prompt=[1 + i % 2 for i in range(length)], max_tokens=max_tokens)
    return replace(caller.submission.specs[0], seed=seed)


def key(spec: SequenceSpec) -> SequenceKey:
    return SequenceKey(spec.sequence_id, spec.attempt)


def computed(pair: Pair) -> None:
    """P dispatches its prompts, and reads the first tokens."""
    pair.p.turn()
    pair.p.turn()


def test_first_token_from_p_and_the_others_from_d():
    pair = Pair()
    spec = pair.start()
    pair.run()
    assert pair.tokens(spec) == right_answer(spec)[0]
    first = [node for node, update in pair.said if 0 in range(update.start, update.start + 1)]
    assert first[0] == "P"
    reports = [update.handoff for _, update in pair.said if update.handoff is not None]
    assert [(r.src, r.dst, r.num_blocks, r.num_reused_blocks) for r in reports] == [
        ("P", "D", 3, 0)
    ]
    pair.check_empty()


def test_every_token_is_told_with_its_logprobs_whoever_is_heard_first():
    pair = Pair()
    spec = spec_of("a")
    params = spec.sampling_params.replace(logprobs=0)
    spec = pair.start(sampling_params=params)
    pair.run()
    told = [update for _, update in pair.said if update.token_ids]
    assert all(len(update.logprobs or ()) == len(update.token_ids) for update in told)
    assert pair.tokens(spec) == right_answer(spec)[0]
    pair.check_empty()


def test_asks_while_the_prompt_is_computed():
    pair = Pair()
    spec = pair.start()
    pair.p.turn()
    assert pair.status(pair.p, spec) is RequestStatus.SENDING
    pair.letters(to="D")
    assert pair.status(pair.d, spec) is RequestStatus.RECEIVING
    pair.letters(to="P")
    assert not pair.wire.transfers, "nothing moves before the token has been read"
    pair.p.turn()
    assert len(pair.wire.transfers) == 1


def test_a_reservation_that_comes_twice_is_one():
    pair = Pair()
    spec = pair.start()
    pair.p.turn()
    (payload,) = pair.wire.letters["P", "D"]
    pair.d.agent.on_notification(payload)
    pair.letters(to="D")
    assert len(pair.wire.letters["D", "P"]) == 1
    pair.run()
    assert pair.tokens(spec) == right_answer(spec)[0]
    pair.check_empty()


def test_an_arrival_may_overtake_filled():
    pair = Pair()
    spec = pair.start()
    pair.p.turn()
    pair.letters(to="D")
    pair.letters(to="P")
    pair.p.turn()
    pair.wire.transfers[0].finish()
    pair.d.hear()
    assert pair.status(pair.d, spec) is RequestStatus.RECEIVING
    pair.letters(to="D")
    assert pair.status(pair.d, spec) is RequestStatus.RUNNING
    pair.run()
    assert pair.tokens(spec) == right_answer(spec)[0]


def test_refused_is_told_when_the_first_token_has_been_read():
    """D's pool could never hold it; the caller has its first token all the same."""
    pair = Pair(num_blocks=3)
    spec = pair.start()
    pair.p.turn()
    pair.letters(to="D")
    pair.letters(to="P")
    assert pair.troubles() == []
    pair.p.turn()
    assert [node for node, _ in pair.troubles()] == ["P"]
    assert "the pool has 3" in pair.troubles()[0][1]
    pair.p.redirect(key(spec), None)
    pair.run()
    assert pair.tokens(spec) == right_answer(spec)[0]
    pair.check_empty()


def test_waits_for_room_but_not_for_ever():
    pair = Pair(seats=1)
    busy = replace(spec_of("busy", max_tokens=12, seed=1), decode_node=None)
    pair.d.start([busy])
    pair.d.turn()
    spec = pair.start()
    computed(pair)
    pair.letters(to="D")
    pair.letters(to="P")
    assert pair.p._sleep_s() == HANDOFF_WAIT_S
    pair.wire.now_s = HANDOFF_WAIT_S - 0.5
    pair.p.tend()
    assert pair.troubles() == []
    assert pair.p._sleep_s() == 0.5
    pair.wire.now_s = HANDOFF_WAIT_S
    pair.p.tend()
    assert pair.troubles() == [("P", "D: no seat: 1 of 1 running for 5 s")]
    assert pair.p._sleep_s() is None
    pair.letters(to="D")
    assert len(pair.d.agent) == 0
    pair.p.redirect(key(spec), None)
    pair.run()
    assert pair.tokens(spec) == right_answer(spec)[0]
    pair.check_empty()


def test_deferred_is_granted_as_soon_as_there_is_room():
    """Also when it is the node's last step that makes it."""
    pair = Pair(seats=1)
    busy = replace(spec_of("busy", max_tokens=2), decode_node=None)
    pair.d.start([busy])
    pair.d.turn()
    spec = pair.start()
    computed(pair)
    pair.letters(to="D")
    while pair.status(pair.d, busy) is not None:
        pair.d.run_step()
    assert pair.status(pair.d, spec) is None
    pair.d.tend()
    assert pair.status(pair.d, spec) is RequestStatus.RECEIVING
    pair.run()
    assert pair.tokens(spec) == right_answer(spec)[0]


def test_a_lost_node_is_told_although_nobody_else_knows():
    pair = Pair()
    spec = pair.start()
    computed(pair)
    pair.letters(to="D")
    pair.wire.kill(pair.d)
    pair.wire.hear_of_loss(pair.wire.losses[0])
    pair.p.hear()
    assert pair.troubles() == [("P", "node D is gone")]
    pair.p.redirect(key(spec), None)
    for _ in range(30):
        pair.p.turn()
    assert pair.tokens(spec) == right_answer(spec)[0]
    pair.p.check_empty()


def test_a_lost_source_leaves_nothing_behind():
    pair = Pair()
    pair.start()
    computed(pair)
    pair.letters(to="D")
    pair.letters(to="P")
    pair.wire.transfers[0].go_on(0)
    pair.wire.kill(pair.p)
    pair.wire.hear_of_loss(pair.wire.losses[0])
    pair.d.hear()
    pair.d.turn()
    pair.d.check_empty()


def test_what_is_said_of_one_may_end_another(caplog: pytest.LogCaptureFixture):
    """A request of two answers fails as a whole as soon as one of them cannot move."""
    pair = Pair()
    pair.start("a")
    second = pair.start("b")
    computed(pair)
    pair.orders = [StopOrder(key(second), "abort")]
    pair.p.release("D")
    pair.p.hear()
    assert len(pair.troubles()) == 1
    assert pair.status(pair.p, second) is None
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


@pytest.mark.parametrize("is_deferred", [False, True])
def test_ended_at_d_is_told_to_p(is_deferred: bool):
    pair = Pair(seats=1)
    if is_deferred:
        busy = replace(spec_of("busy", max_tokens=12, seed=1), decode_node=None)
        pair.d.start([busy])
        pair.d.turn()
    spec = pair.start()
    computed(pair)
    pair.letters(to="D")
    pair.d.stop([StopOrder(SequenceKey("nobody", 0), "abort"), StopOrder(key(spec), "abort")])
    pair.d.hear()
    assert len(pair.d.agent) in (0, 1)  # blocks are looked after once more
    pair.d.tend()
    assert len(pair.d.agent) == 0
    pair.letters(to="P")
    assert [node for node, _ in pair.troubles()] == ["P"]
    pair.p.stop([StopOrder(key(spec), "abort")])
    pair.run()
    pair.check_empty()


@pytest.mark.parametrize("is_writing", [False, True])
def test_blocks_stay_with_d_while_a_transfer_may_write_to_them(is_writing: bool):
    pair = Pair()
    spec = pair.start()
    computed(pair)
    pair.letters(to="D")
    pair.letters(to="P")
    (transfer,) = pair.wire.transfers
    if is_writing:
        transfer.go_on(0)
    pair.p.stop([StopOrder(key(spec), "abort")])
    pair.p.hear()
    assert transfer.is_cancelled
    pair.letters(to="D")
    pair.d.tend()
    assert pair.status(pair.d, spec) is None
    assert pair.d.blocks.num_pinned_blocks == (3 if is_writing else 0)
    if is_writing:
        assert pair.d._sleep_s() == 0.05
        transfer.finish()
    transfer.acknowledge()
    pair.run()
    pair.check_empty()


def test_a_newer_attempt_goes_before_one_that_waits():
    """P was lost and the sequence placed anew, and D has not heard of it."""
    pair = Pair(seats=1)
    busy = replace(spec_of("busy", max_tokens=12, seed=1), decode_node=None)
    pair.d.start([busy])
    pair.d.turn()
    pair.start("a", attempt=1)
    computed(pair)
    other = StillNode("Q", pair.wire, pair.hear)
    newer = pair.start("a", at=other, attempt=2)
    other.turn()
    other.turn()
    pair.letters(to="D")
    pair.wire.deliver(("Q", "D"))
    pair.d.hear()
    assert len(pair.d.agent) == 2
    pair.d.stop([StopOrder(key(busy), "abort")])
    pair.d.hear()
    pair.d.tend()
    assert pair.d._served.find(key(newer)) is not None


def test_a_newer_reservation_replaces_an_older_one():
    pair = Pair()
    pair.start("a", attempt=1)
    computed(pair)
    pair.letters(to="D")
    other = StillNode("Q", pair.wire, pair.hear)
    newer = pair.start("a", at=other, attempt=2)
    other.turn()
    pair.wire.deliver(("Q", "D"))
    pair.d.hear()
    assert pair.d._served.find(key(newer)) is not None
    pair.letters(to="P")
    assert [node for node, _ in pair.troubles()] == ["P"]


def test_redirected_to_the_same_node_again():
    pair = Pair()
    spec = pair.start()
    computed(pair)
    pair.letters(to="D")
    pair.letters(to="P")
    pair.wire.transfers[0].go_on(0)
    pair.p.redirect(key(spec), "D")
    pair.run()
    assert pair.tokens(spec) == right_answer(spec)[0]
    pair.check_empty()


def test_redirect_of_what_has_left():
    pair = Pair()
    spec = pair.start()
    pair.run()
    pair.p.redirect(key(spec), None)
    pair.p.hear()
    node, update = pair.said[-1]
    assert node == "P" and isinstance(update.error, RetryableRequestError)


@pytest.mark.parametrize("target", ["D", None])
def test_redirected_before_it_is_announced(target: str | None):
    pair = Pair()
    spec = pair.start(prompt_token_ids=[1] * 16, max_total_tokens=20)
    pair.p.turn()
    assert pair.status(pair.p, spec) is RequestStatus.RUNNING
    pair.p.redirect(key(spec), target)
    pair.run()
    assert pair.tokens(spec) == right_answer(spec)[0]
    assert any(update.handoff for _, update in pair.said) == (target == "D")
    pair.check_empty()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_turns", [1, 2, 3, 4, 5])
def test_what_decodes_is_handed_on(num_turns: int, overlap: bool):
    pair = Pair()
    pair.p._enable_overlap = overlap
    spec = replace(spec_of("a", max_tokens=12), decode_node=None)
    pair.p.start([spec])
    for _ in range(num_turns):
        pair.p.turn()
    pair.p.redirect(key(spec), "D")
    pair.run()
    assert pair.tokens(spec) == right_answer(spec)[0]
    assert pair.said[-1][0] == "D"
    pair.check_empty()


def test_what_decodes_does_not_wait_for_room():
    pair = Pair(seats=1)
    busy = replace(spec_of("busy", max_tokens=12, seed=1), decode_node=None)
    pair.d.start([busy])
    pair.d.turn()
    spec = replace(spec_of("a", max_tokens=12), decode_node=None)
    pair.p.start([spec])
    computed(pair)
    pair.p.redirect(key(spec), "D")
    computed(pair)
    assert pair.status(pair.p, spec) is RequestStatus.SENDING
    pair.letters(to="D")
    pair.letters(to="P")
    assert pair.troubles() == [("P", "D: no seat: 1 of 1 running")]
    pair.p.redirect(key(spec), None)
    pair.run()
    assert pair.tokens(spec) == right_answer(spec)[0]
    pair.check_empty()


def test_deadline_on_the_way():
    pair = Pair()
    spec = pair.start(deadline_s=3.0)
    computed(pair)
    pair.letters(to="D")
    assert pair.p._sleep_s() == 3.0 and pair.d._sleep_s() == 3.0
    pair.wire.now_s = 3.0
    pair.d.turn()
    pair.p.turn()
    assert [(node, type(update.error)) for node, update in pair.said if update.error] == [
        ("D", DeadlineExceeded),
        ("P", DeadlineExceeded),
    ]
    pair.run(3)
    assert pair.status(pair.p, spec) is None
    pair.check_empty()


def test_the_first_token_ends_it():
    pair = Pair()
    spec = pair.start(sampling_params=replace(spec_of("a").sampling_params, max_tokens=1))
    pair.run()
    assert pair.tokens(spec) == right_answer(spec)[0][:1]
    assert pair.said[-1][1].finish_reason == "length"
    pair.check_empty()


def test_a_reservation_for_two_sequences_is_refused():
    pair = Pair()
    sequences = specs_to_wire([spec_of("a"), spec_of("b")], pair.wire.now_s)
    pair.d.agent.on_notification(messages.encode(messages.Reserve("h", "P", sequences)))
    pair.d.hear()
    assert len(pair.d.agent) == 0
    [letter] = pair.wire.letters["D", "P"]
    answer = messages.decode(letter)
    assert isinstance(answer, messages.Refused) and "2 sequences" in answer.reason


def test_filled_that_does_not_fit_is_given_up():
    pair = Pair()
    pair.start()
    computed(pair)
    pair.letters(to="D")
    (handoff,) = pair.d.agent._receiver._by_handoff
    filled = messages.Filled(handoff, messages.pack_ids([1]), 1, 1, 1, 32, 0.0)
    pair.d.agent.on_notification(messages.encode(filled))
    pair.d.hear()
    pair.d.tend()
    assert len(pair.d.agent) == 0
    pair.letters(to="P")
    assert "3 blocks and one token are due" in pair.troubles()[0][1]


def test_a_message_that_cannot_be_read_changes_nothing(caplog: pytest.LogCaptureFixture):
    pair = Pair()
    spec = pair.start()
    pair.d.agent.on_notification(b"\x93\x01")
    assert "not a hand-off message" in caplog.text
    pair.run()
    assert pair.tokens(spec) == right_answer(spec)[0]


def test_one_that_fails_unexpectedly_is_given_up_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    pair = Pair()
    spec, other = pair.start("a"), pair.start("b")
    receive = pair.d.plan.receive

    def fail(request, *args):
        if request.request_id == "a":
            raise ValueError("injected")
        receive(request, *args)

    monkeypatch.setattr(pair.d.plan, "receive", fail)
    with caplog.at_level(logging.ERROR):
        pair.run()
    assert "ValueError: injected" in caplog.text
    assert pair.tokens(other) == right_answer(other)[0]
    errors = [(node, update.error) for node, update in pair.said if update.error is not None]
    # The transfer was complete, so P has let go of it: whoever dispatches has to know.
    ((node, error),) = errors
    assert node == "D" and isinstance(error, GenerationError)
    pair.p.stop([StopOrder(key(spec), "abort")])
    pair.run(3)
    pair.check_empty()
