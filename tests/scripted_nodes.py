"""Nodes and a router that follow the protocol without computing anything.

A node's tokens are a function of all tokens before them and the seed, so the right answer of any
sequence is known whatever happens to it, and one wrong token spoils all that follow. Nothing moves
by itself: `work`, `move` and `hear` make a node go on, `speak` brings its oldest news to the
dispatcher, so that a test can have any two things cross.
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from flowkv_jax.cluster.dispatcher import Dispatcher
from flowkv_jax.cluster.node_port import SequenceKey, StopOrder
from flowkv_jax.cluster.submission import Submission, child_id
from flowkv_jax.controller.routing import NoNodeAvailable, Placement, RouteQuery
from flowkv_jax.engine.output_processor import LogprobsRow, RequestOutputState
from flowkv_jax.errors import RetryableRequestError
from flowkv_jax.outputs import RequestOutput
from flowkv_jax.sampling_params import RequestOutputKind, SamplingParams
from flowkv_jax.sequence import HandoffReport, PromptLogprobs, SequenceSpec, SequenceUpdate

EOS = 0


def next_token(seed: int, token_ids: Sequence[int]) -> int:
    """A letter, or the end token once in a while."""
    number = zlib.crc32(repr((seed, list(token_ids))).encode())
    return EOS if number % 19 == 0 else ord("a") + number % 7


def right_answer(spec: SequenceSpec) -> tuple[list[int], str, str]:
    """Token ids, text and finish reason of an undisturbed sequence."""
    stops = spec.sampling_params.stop_strings
    token_ids: list[int] = []
    text = ""
    while True:
        token = next_token(spec.seed, [*spec.prompt_token_ids, *token_ids])
        token_ids.append(token)
        if token == EOS:
            return token_ids, text, "stop"
        text += chr(token)
        for stop in stops:
            if stop in text:
                return token_ids, text[: text.index(stop)], "stop"
        if len(spec.prompt_token_ids) + len(token_ids) == spec.max_total_tokens:
            return token_ids, text, "length"


class LetterDecoder:
    def step(self, token_id: int) -> str | None:
        return None if token_id == EOS else chr(token_id)

    def flush(self) -> str:
        return ""


class LetterDetokenizer:
    def decode_stream(self, skip_special_tokens: bool) -> LetterDecoder:
        return LetterDecoder()

    def token_text(self, token_id: int) -> str:
        return chr(token_id)


@dataclass
class Caller:
    """Whoever submitted a request, and what it has been told.

    Attributes:
        is_told_too_much: something came after the end, or after the request had been refused.
        then: called from within the sink.
    """

    submission: Submission
    accepted: Future[None] | None = None
    outputs: list[RequestOutput] = field(default_factory=list)
    error: Exception | None = None
    is_told_too_much: bool = False
    then: Callable[[Caller], object] | None = None

    @property
    def is_done(self) -> bool:
        return self.error is not None or bool(self.outputs and self.outputs[-1].finished)

    @property
    def last(self) -> RequestOutput:
        return self.outputs[-1]

    def hear(self, item: RequestOutput | Exception) -> None:
        is_refused = self.accepted is not None and self.accepted.exception(timeout=0) is not None
        self.is_told_too_much |= self.is_done or is_refused
        if isinstance(item, Exception):
            self.error = item
        else:
            self.outputs.append(item)
        if self.then is not None:
            self.then(self)

    def told(self, index: int = 0) -> list[int]:
        """Token ids of an answer, put together from what was new in each output."""
        return [
            token
            for output in self.outputs
            for answer in output.outputs
            if answer.index == index
            for token in answer.delta_token_ids
        ]


def new_caller(
    request_id: str = "r",
    *,
    prompt: Sequence[int] = (1, 2, 3),
    max_tokens: int = 6,
    seed: int = 1,
    n: int = 1,
    arrival_s: float = 0.0,
    deadline_s: float | None = None,
    **params: object,
) -> Caller:
    params.setdefault("output_kind", RequestOutputKind.DELTA)
    sampling = SamplingParams(max_tokens=max_tokens, n=n, **params)  # type: ignore[arg-type]
    prompt_token_ids = list(prompt)
    specs = [
        SequenceSpec(
            sequence_id=child_id(request_id, index),
            prompt_token_ids=prompt_token_ids,
            sampling_params=sampling,
            seed=seed + 100 * index,
            max_total_tokens=len(prompt_token_ids) + max_tokens,
            arrival_s=arrival_s,
            deadline_s=deadline_s,
        )
        for index in range(n)
    ]
    output = RequestOutputState(
        request_id,
        sampling,
        prompt=None,
        prompt_token_ids=prompt_token_ids,
        detokenizer=LetterDetokenizer(),
    )
    caller: Caller
    caller = Caller(Submission(request_id, specs, output, lambda item: caller.hear(item)))
    return caller


@dataclass
class Held:
    """A sequence at a node. Phases: prefill, leaving, stuck (asked what to do), decode."""

    spec: SequenceSpec
    token_ids: list[int]
    phase: str
    target: str | None


class ScriptedNode:
    """A `NodePort` and the node behind it."""

    def __init__(self, name: str, nodes: dict[str, ScriptedNode]) -> None:
        self.name = name
        self._nodes = nodes
        self._inbox: deque[Callable[[], None]] = deque()
        self.held: dict[SequenceKey, Held] = {}
        self.half_received: dict[SequenceKey, str] = {}
        self.news: deque[list[SequenceUpdate]] = deque()
        self.refusals: deque[Exception] = deque()
        self.orders: list[StopOrder] = []
        self.calls: list[tuple[object, ...]] = []
        self.specs: list[SequenceSpec] = []
        self.is_dead = False
        nodes[name] = self

    # NodePort

    def start(self, specs: Sequence[SequenceSpec]) -> Future[None]:
        answer: Future[None] = Future()
        self.specs.extend(specs)
        self.calls.append(("start", *[SequenceKey(s.sequence_id, s.attempt) for s in specs]))
        self._inbox.append(lambda: self._start(list(specs), answer))
        return answer

    def stop(self, orders: Sequence[StopOrder]) -> None:
        self.calls.append(("stop", *orders))
        self._inbox.append(lambda: self.carry_out(orders))

    def redirect(self, key: SequenceKey, decode_node: str | None) -> None:
        self.calls.append(("redirect", key, decode_node))
        self._inbox.append(lambda: self._redirect(key, decode_node))

    def release(self, node: str) -> None:
        self.calls.append(("release", node))
        self._inbox.append(lambda: self._release(node))

    # What a test has it do

    def hear(self) -> None:
        """Do all that was asked. A dead node hears nothing."""
        while self._inbox and not self.is_dead:
            self._inbox.popleft()()

    def work(self) -> None:
        """One step: a token for each sequence that can have one."""
        if self.is_dead:
            return
        updates = [u for key in list(self.held) if (u := self._generate(key)) is not None]
        if updates:
            self.news.append(updates)

    def move(self, key: SequenceKey, outcome: str = "done") -> None:
        """Hand a sequence off. Outcomes: done, refused, half (the destination keeps a part),
        unacknowledged (the destination has it, and this node does not know)."""
        held = self.held[key]
        assert held.phase == "leaving" and held.target is not None
        target = self._nodes.get(held.target)
        if target is None or target.is_dead:
            outcome = "refused"
        if target is not None and outcome == "half":
            target.half_received[key] = self.name
        if target is not None and outcome in ("done", "unacknowledged"):
            target._receive(self.name, key, held)
        if outcome == "done":
            del self.held[key]
        else:
            self._ask(key, f"hand-off {outcome}")

    def speak(self, dispatcher: Dispatcher) -> list[SequenceUpdate]:
        """Bring the oldest news to the dispatcher, and carry out what it orders."""
        updates = self.news.popleft()
        orders = dispatcher.deliver(self.name, updates)
        self.orders.extend(orders)
        self._inbox.append(lambda: self.carry_out(orders))
        return updates

    def run(self, dispatcher: Dispatcher) -> None:
        """Hear, work, hand off and speak once, unless it is dead."""
        if self.is_dead:
            return
        self.hear()
        self.work()
        for key in [key for key, held in self.held.items() if held.phase == "leaving"]:
            self.move(key)
        while self.news:
            self.speak(dispatcher)
        self.hear()

    @property
    def started(self) -> list[SequenceKey]:
        """All that it was given, in order."""
        return [SequenceKey(spec.sequence_id, spec.attempt) for spec in self.specs]

    @property
    def is_empty(self) -> bool:
        return not self.held and not self.half_received

    # Inside

    def _start(self, specs: list[SequenceSpec], answer: Future[None]) -> None:
        if self.refusals:
            answer.set_exception(self.refusals.popleft())
            return
        for spec in specs:
            key = SequenceKey(spec.sequence_id, spec.attempt)
            assert key not in self.held, "a key was used twice"
            self.held[key] = Held(spec, list(spec.output_token_ids), "prefill", spec.decode_node)
        answer.set_result(None)

    def carry_out(self, orders: Sequence[StopOrder]) -> None:
        for order in orders:
            held = self.held.pop(order.key, None)
            self.half_received.pop(order.key, None)
            target = self._nodes.get(held.target or "") if held is not None else None
            if target is not None and target.half_received.get(order.key) == self.name:
                del target.half_received[order.key]

    def _redirect(self, key: SequenceKey, decode_node: str | None) -> None:
        held = self.held.get(key)
        if held is None:
            gone = RetryableRequestError(f"{self.name} does not hold {key}")
            self._tell(SequenceUpdate(sequence_id=key[0], attempt=key[1], error=gone))
            return
        old = self._nodes.get(held.target or "")
        if old is not None and old.half_received.get(key) == self.name:
            del old.half_received[key]
        held.target = decode_node
        if held.phase in ("leaving", "stuck"):
            held.phase = "decode" if decode_node is None else "leaving"

    def _release(self, node: str) -> None:
        self.half_received = {k: src for k, src in self.half_received.items() if src != node}
        for key, held in self.held.items():
            if held.target == node and held.phase == "leaving":
                self._ask(key, f"{node} is gone")

    def _ask(self, key: SequenceKey, why: str) -> None:
        held = self.held[key]
        held.phase = "stuck"
        self._tell(
            SequenceUpdate(
                sequence_id=key.sequence_id,
                attempt=key.attempt,
                handoff_error=why,
                decode_node=held.target,
            )
        )

    def _receive(self, source: str, key: SequenceKey, held: Held) -> None:
        self.half_received.pop(key, None)
        self.held[key] = Held(held.spec, held.token_ids.copy(), "decode", None)
        self._tell(
            SequenceUpdate(
                sequence_id=key.sequence_id,
                attempt=key.attempt,
                start=len(held.token_ids),
                handoff=report(source, self.name),
            )
        )

    def _tell(self, update: SequenceUpdate) -> None:
        self.news.append([update])

    def _generate(self, key: SequenceKey) -> SequenceUpdate | None:
        held = self.held[key]
        if held.phase not in ("prefill", "decode"):
            return None
        spec = held.spec
        params = spec.sampling_params
        prompt = spec.prompt_token_ids
        start = len(held.token_ids)
        token = next_token(spec.seed, [*prompt, *held.token_ids])
        held.token_ids.append(token)
        scores = None
        if held.phase == "prefill":
            held.phase = "decode" if held.target is None else "leaving"
            if params.prompt_logprobs is not None:
                rows = tuple(LogprobsRow(-float(t), 1) for t in prompt[1:])
                scores = PromptLogprobs(1, tuple(prompt[1:]), rows)
        is_full = len(prompt) + len(held.token_ids) == spec.max_total_tokens
        if token == EOS or is_full:
            del self.held[key]
        return SequenceUpdate(
            sequence_id=key.sequence_id,
            attempt=key.attempt,
            start=start,
            token_ids=(token,),
            logprobs=None if params.logprobs is None else (LogprobsRow(-float(token), 1),),
            prompt_logprobs=scores,
            finish_reason="stop" if token == EOS else "length" if is_full else None,
            scheduled_s=0.5,
        )


def report(src: str, dst: str) -> HandoffReport:
    return HandoffReport(src, dst, "direct", "local", 1, 1, 4096, 1, 0, 0.0, 0.001, 0.002)


class ScriptedRouter:
    """`Routing` by lot, which counts that each booking is used as agreed.

    Attributes:
        prefill, decode: names to choose from, in order; a sequence stays where it is prefilled if
            `decode` is empty.
        lot: draws at random; None takes the first.
    """

    def __init__(self, prefill: Sequence[str] = (), decode: Sequence[str] = ()) -> None:
        self.prefill = list(prefill)
        self.decode = list(decode)
        self.lot: random.Random | None = None
        self.queries: list[RouteQuery] = []
        self.placements: dict[int, Placement] = {}
        self.open: set[int] = set()
        self.prefilled_ones: set[int] = set()
        self.moved_ones: set[int] = set()

    def place(self, query: RouteQuery, now_s: float) -> Placement:
        self.queries.append(query)
        prefill = query.prefill_node
        if prefill is None:
            prefill = self._choose(self.prefill, query.exclude)
        decode = self._choose(self.decode, query.exclude) if self.decode else prefill
        placement = Placement(len(self.placements), prefill, decode)
        self.placements[placement.booking] = placement
        self.open.add(placement.booking)
        return placement

    def _choose(self, names: Sequence[str], exclude: frozenset[str]) -> str:
        fit = [name for name in names if name not in exclude]
        if not fit:
            raise NoNodeAvailable("none of them is there")
        return fit[0] if self.lot is None else self.lot.choice(fit)

    def prefilled(self, booking: int, now_s: float) -> None:
        assert booking in self.open and booking not in self.prefilled_ones
        self.prefilled_ones.add(booking)

    def moved(self, booking: int, handoff: HandoffReport, now_s: float) -> None:
        assert booking in self.open and booking not in self.moved_ones
        assert handoff.dst == self.placements[booking].decode_node
        self.moved_ones.add(booking)

    def ended(self, booking: int, now_s: float) -> None:
        assert booking in self.open, "a booking ended twice"
        self.open.remove(booking)
