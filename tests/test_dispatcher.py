"""The dispatcher, told as what its callers and nodes can rely on."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest

from flowkv_jax.cluster.dispatch_events import DispatchEvent, DispatchEventKind, LostPlace
from flowkv_jax.cluster.dispatcher import Dispatcher
from flowkv_jax.cluster.node_port import SequenceKey, StopOrder
from flowkv_jax.engine.output_processor import LogprobsRow
from flowkv_jax.errors import (
    DeadlineExceeded,
    DuplicateRequestError,
    EngineDeadError,
    GenerationError,
    MaxQueuedTokensError,
    QueueOverflowError,
    RetryableRequestError,
    ValidationError,
)
from flowkv_jax.sampling_params import RequestOutputKind
from flowkv_jax.sequence import PromptLogprobs, SequenceUpdate
from tests.scripted_nodes import (
    Caller,
    ScriptedNode,
    ScriptedRouter,
    new_caller,
    report,
    right_answer,
)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Cluster:
    """A dispatcher over scripted nodes: those of `prefill` and `decode`, or one that does both."""

    def __init__(self, prefill: str = "A", decode: str = "", **options: Any) -> None:
        self.router = ScriptedRouter(prefill.split(), decode.split())
        self.clock = Clock()
        options.setdefault("max_waiting_requests", 100)
        self.dispatcher = Dispatcher(self.router, clock=self.clock, **options)
        self.nodes: dict[str, ScriptedNode] = {}
        for name in dict.fromkeys([*self.router.prefill, *self.router.decode]):
            self.join(name)

    def join(self, name: str) -> ScriptedNode:
        node = ScriptedNode(name, self.nodes)
        self.dispatcher.add_node(node)
        return node

    def lose(self, name: str) -> None:
        """A node is killed, and everybody knows."""
        self.nodes[name].is_dead = True
        for names in (self.router.prefill, self.router.decode):
            if name in names:
                names.remove(name)
        self.dispatcher.lose_node(name, "killed")

    def submit(self, *args: Any, **kwargs: Any) -> Caller:
        caller = new_caller(*args, **kwargs)
        caller.accepted = self.dispatcher.submit(caller.submission)
        return caller

    def run(self, *callers: Caller) -> None:
        """Until these callers are done, and the nodes have nothing left to do."""
        for _ in range(100):
            for node in self.nodes.values():
                node.run(self.dispatcher)
            self.dispatcher.check()
            if all(caller.is_done for caller in callers):
                break
        for caller in callers:
            assert caller.is_done

    def news(self, node: str, sequence_id: str = "r", **what: Any) -> list[StopOrder]:
        """Have a node tell something of the latest attempt of a sequence."""
        update = SequenceUpdate(sequence_id=sequence_id, attempt=self.attempt(sequence_id), **what)
        return self.dispatcher.deliver(node, [update])

    def attempt(self, sequence_id: str = "r") -> int:
        """The number of its latest placement."""
        keys = [key for node in self.nodes.values() for key in node.started]
        return max(key.attempt for key in keys if key.sequence_id == sequence_id)

    def check_empty(self) -> None:
        """Nobody holds anything any more."""
        for node in self.nodes.values():
            node.hear()
            assert node.is_empty or node.is_dead, node.name
        assert not self.router.open
        assert self.dispatcher.num_live == self.dispatcher.num_pending == 0
        self.dispatcher.check()


def check_right(caller: Caller) -> None:
    """Every answer is the right one, told once and in order."""
    assert caller.error is None
    for index, spec in enumerate(caller.submission.specs):
        token_ids, text, finish_reason = right_answer(spec)
        assert caller.told(index) == token_ids
        answers = [a for o in caller.outputs for a in o.outputs if a.index == index]
        assert "".join(answer.delta_text for answer in answers) == text
        assert answers[-1].finish_reason == finish_reason


class TestOneNode:
    @pytest.mark.parametrize("kind", list(RequestOutputKind))
    def test_tokens_come_in_order_and_the_end_once(self, kind: RequestOutputKind) -> None:
        cluster = Cluster()
        caller = cluster.submit(output_kind=kind)
        cluster.run(caller)
        if kind is RequestOutputKind.FINAL_ONLY:
            assert len(caller.outputs) == 1
        check_right(caller)
        cluster.check_empty()

    def test_answers_of_one_request(self) -> None:
        cluster = Cluster()
        caller = cluster.submit(n=3)
        cluster.run(caller)
        check_right(caller)
        assert cluster.nodes["A"].calls == [
            ("start", SequenceKey("r", 0), SequenceKey("r#1", 1), SequenceKey("r#2", 2))
        ]
        cluster.check_empty()

    def test_stop_string_ends_the_sequence_at_the_node(self) -> None:
        cluster = Cluster()
        text = right_answer(new_caller(max_tokens=30).submission.specs[0])[1]
        caller = cluster.submit(max_tokens=30, stop=text[2:4])
        cluster.run(caller)
        check_right(caller)
        assert cluster.nodes["A"].orders == [StopOrder(SequenceKey("r", 0), "stop", text[2:4])]
        cluster.check_empty()

    def test_no_order_for_what_the_node_has_ended_itself(self) -> None:
        cluster = Cluster()
        cluster.submit(stop="a")
        assert cluster.news("A", token_ids=(97,), finish_reason="length") == []

    def test_abort(self) -> None:
        cluster = Cluster()
        caller = cluster.submit()
        cluster.nodes["A"].run(cluster.dispatcher)
        assert cluster.dispatcher.abort(["r", "r", "unknown"]) == 1
        assert caller.last.finished and caller.last.outputs[0].finish_reason == "abort"
        cluster.check_empty()

    def test_an_id_in_use_is_refused_and_withdrawing_spares_its_namesake(self) -> None:
        cluster = Cluster()
        first, second = cluster.submit(), cluster.submit()
        assert isinstance(refusal(second), DuplicateRequestError)
        assert cluster.dispatcher.withdraw([second.submission]) == 0
        cluster.run(first)
        check_right(first)
        assert not second.outputs

    def test_an_id_may_be_used_again_while_old_news_are_under_way(self) -> None:
        cluster = Cluster()
        first = cluster.submit(seed=1)
        node = cluster.nodes["A"]
        node.hear()
        node.work()
        assert cluster.dispatcher.withdraw([first.submission]) == 1
        second = cluster.submit(seed=2)
        node.speak(cluster.dispatcher)
        assert node.orders == [StopOrder(SequenceKey("r", 0), "abort")]
        cluster.run(second)
        check_right(second)

    def test_logprobs_travel_and_those_of_the_prompt_are_told_once(self) -> None:
        cluster = Cluster()
        caller = cluster.submit(logprobs=0, prompt_logprobs=0, n=2)
        rows = (LogprobsRow(-2.0, 1), LogprobsRow(-3.0, 1))
        early = PromptLogprobs(1, (2,), rows[:1])
        for sequence_id in ("r", "r#1"):  # the answers share the prompt
            cluster.news("A", sequence_id, prompt_logprobs=early)
            cluster.news("A", sequence_id, prompt_logprobs=PromptLogprobs(1, (2, 3), rows))
        cluster.news("A", token_ids=(97,), logprobs=(LogprobsRow(-97.0, 1),))
        cluster.nodes["A"].run(cluster.dispatcher)
        first = caller.outputs[0]
        assert first.prompt_logprobs is not None
        assert [p and {t: v.logprob for t, v in p.items()} for p in first.prompt_logprobs] == [
            None,
            {2: -2.0},
            {3: -3.0},
        ]
        assert first.outputs[0].logprobs is not None
        assert first.outputs[0].logprobs[0][97].logprob == -97.0

    def test_a_hole_in_prompt_logprobs_fails_the_request_and_no_other(self) -> None:
        cluster = Cluster()
        caller, other = cluster.submit(prompt_logprobs=0), cluster.submit("other")
        cluster.news("A", prompt_logprobs=PromptLogprobs(2, (3,), (LogprobsRow(-3.0, 1),)))
        assert isinstance(caller.error or refusal(caller), GenerationError)
        cluster.run(other)
        check_right(other)
        cluster.check_empty()

    def test_metrics(self) -> None:
        cluster = Cluster()
        caller = cluster.submit()
        cluster.clock.now_s = 2.0
        cluster.news("A", token_ids=(97,), scheduled_s=1.5, num_preemptions=1, num_cached_tokens=2)
        cluster.clock.now_s = 3.0
        cluster.news("A", start=1, token_ids=(98,), scheduled_s=1.5, num_preemptions=3)
        metrics = caller.last.metrics
        assert metrics is not None
        assert (metrics.arrival_time, metrics.scheduled_ts) == (0.0, 1.5)
        assert (metrics.first_token_ts, metrics.last_token_ts) == (2.0, 3.0)
        assert metrics.num_preemptions == 3
        assert caller.last.num_cached_tokens == 2


class TestTwoNodes:
    """P computes the prompt, D decodes."""

    def test_hand_off(self) -> None:
        cluster = Cluster("P", "D")
        caller = cluster.submit()
        cluster.run(caller)
        check_right(caller)
        assert cluster.router.moved_ones == cluster.router.prefilled_ones == {0}
        assert not [call for call in cluster.nodes["P"].calls if call[0] == "stop"]
        (record,) = cluster.dispatcher.finished_records()
        assert record.handoff is not None and (record.prefill_node, record.decode_node) == (
            "P",
            "D",
        )
        cluster.check_empty()

    def test_the_first_token_comes_from_the_prefill_node_at_once(self) -> None:
        cluster = Cluster("P", "D")
        caller = cluster.submit()
        cluster.news("P", token_ids=(97,))
        assert caller.told() == [97]

    def test_tokens_are_put_in_order(self) -> None:
        cluster = Cluster("P", "D")
        caller = cluster.submit()
        cluster.news("D", start=1, handoff=report("P", "D"))
        cluster.news("D", start=2, token_ids=(99,), finish_reason="length")
        cluster.news("D", start=1, token_ids=(98,))
        assert not caller.outputs
        cluster.news("P", token_ids=(97,))
        assert caller.told() == [97, 98, 99]
        assert caller.last.finished
        assert not cluster.router.open

    def test_known_tokens_are_dropped(self) -> None:
        cluster = Cluster("P", "D")
        caller = cluster.submit(logprobs=0)
        rows = tuple(LogprobsRow(-float(t), 1) for t in (97, 98, 99))
        cluster.news("P", token_ids=(97, 98), logprobs=rows[:2])
        cluster.news("P", token_ids=(97,), logprobs=rows[:1])
        cluster.news("D", start=0, token_ids=(97, 98, 99), logprobs=rows)
        assert caller.told() == [97, 98, 99]
        logprobs = caller.last.outputs[0].logprobs
        assert logprobs is not None and [list(row) for row in logprobs] == [[99]]

    def test_a_stop_string_ends_both_sides(self) -> None:
        cluster = Cluster("P", "D")
        caller = cluster.submit(stop="a")
        order = StopOrder(SequenceKey("r", 0), "stop", "a")
        assert cluster.news("P", token_ids=(97,)) == [order]
        assert ("stop", order) in cluster.nodes["D"].calls
        assert caller.last.finished

    def test_a_stop_string_that_the_prefill_node_completes_late(self) -> None:
        cluster = Cluster("P", "D")
        cluster.submit(stop="a")
        cluster.news("D", start=1, handoff=report("P", "D"))
        assert cluster.news("P", token_ids=(97,)) == []  # it holds nothing any more
        assert ("stop", StopOrder(SequenceKey("r", 0), "stop", "a")) in cluster.nodes["D"].calls

    def test_an_abort_reaches_both_sides(self) -> None:
        cluster = Cluster("P", "D")
        cluster.submit()
        cluster.news("P", token_ids=(97,))
        cluster.dispatcher.abort(["r"])
        order = ("stop", StopOrder(SequenceKey("r", 0), "abort"))
        assert all(node.calls[-1] == order for node in cluster.nodes.values())

    def test_news_of_others_are_answered_with_an_order_to_stop(self) -> None:
        cluster = Cluster("P", "D")
        cluster.submit()
        cluster.join("X")
        stale = StopOrder(SequenceKey("r", 0), "abort")
        assert cluster.news("X", start=1, token_ids=(98,)) == [stale]
        unknown = SequenceUpdate(sequence_id="u", attempt=3, token_ids=(1,))
        gone = SequenceUpdate(sequence_id="u", attempt=3, finish_reason="stop")
        orders = cluster.dispatcher.deliver("P", [unknown, gone])
        assert orders == [StopOrder(SequenceKey("u", 3), "abort")]


class TestLostNodes:
    """A node dies, hangs or leaves."""

    def test_at_any_token_of_a_single_node(self) -> None:
        for num_steps in range(7):
            cluster = Cluster("A B")
            caller = cluster.submit(max_tokens=7)
            for _ in range(num_steps):
                cluster.nodes["A"].run(cluster.dispatcher)
            cluster.lose("A")
            cluster.run(caller)
            check_right(caller)
            cluster.check_empty()

    def test_the_next_node_goes_on_from_what_was_told(self) -> None:
        cluster = Cluster("A B", hash_block_size=2)
        caller = cluster.submit()
        cluster.nodes["A"].run(cluster.dispatcher)
        cluster.nodes["A"].run(cluster.dispatcher)
        cluster.lose("A")
        spec = cluster.nodes["B"].specs[-1]
        assert (list(spec.output_token_ids), spec.attempt) == (caller.told(), 1)
        first, second = cluster.router.queries
        assert (first.num_tokens, second.num_tokens) == (3, 5)
        assert second.block_hashes[: len(first.block_hashes)] == first.block_hashes
        assert (len(first.block_hashes), len(second.block_hashes)) == (1, 2)
        assert (first.max_new_tokens, second.max_new_tokens) == (6, 4)

    def test_prefill_node_while_it_computes(self) -> None:
        cluster = Cluster("P Q", "D")
        caller = cluster.submit()
        cluster.lose("P")
        assert cluster.nodes["Q"].started == [SequenceKey("r", 1)]
        assert cluster.nodes["D"].calls == [
            ("stop", StopOrder(SequenceKey("r", 0), "abort")),
            ("release", "P"),
        ]
        cluster.run(caller)
        check_right(caller)
        cluster.check_empty()

    def test_prefill_node_while_it_hands_off(self) -> None:
        cluster = Cluster("P Q", "D")
        caller = cluster.submit()
        old = SequenceUpdate(sequence_id="r", attempt=0, start=1, handoff=report("P", "D"))
        cluster.news("P", token_ids=(right_answer(caller.submission.specs[0])[0][0],))
        cluster.lose("P")
        assert cluster.dispatcher.deliver("D", [old]) == [StopOrder(SequenceKey("r", 0), "abort")]
        cluster.run(caller)
        check_right(caller)

    def test_prefill_node_after_it_has_handed_off(self) -> None:
        cluster = Cluster("P Q", "D")
        caller = cluster.submit()
        for node in cluster.nodes.values():
            node.run(cluster.dispatcher)
        cluster.lose("P")
        assert not cluster.nodes["Q"].started
        cluster.run(caller)
        check_right(caller)

    @pytest.mark.parametrize("is_decoding", [False, True])
    def test_prefill_node_that_took_the_first_token_with_it(self, is_decoding: bool) -> None:
        cluster = Cluster("P Q", "D")
        caller = cluster.submit()
        cluster.news("D", start=1, handoff=report("P", "D"))
        if is_decoding:
            cluster.news("D", start=1, token_ids=(98,))
        cluster.lose("P")
        if not is_decoding:
            cluster.news("D", start=1, token_ids=(98,))
        assert cluster.nodes["Q"].started == [SequenceKey("r", 1)]
        cluster.run(caller)
        check_right(caller)
        cluster.check_empty()

    def test_decode_node_while_it_decodes(self) -> None:
        cluster = Cluster("P", "D E")
        caller = cluster.submit()
        for node in (*cluster.nodes.values(), cluster.nodes["D"]):
            node.run(cluster.dispatcher)
        cluster.lose("D")
        assert cluster.nodes["P"].specs[-1].decode_node == "E"
        cluster.run(caller)
        check_right(caller)
        cluster.check_empty()

    def test_decode_node_before_it_has_the_cache(self) -> None:
        for num_prefill_tokens in (0, 1):
            cluster = Cluster("P", "D E")
            caller = cluster.submit()
            if num_prefill_tokens:
                cluster.nodes["P"].hear()
                cluster.nodes["P"].work()
                cluster.nodes["P"].speak(cluster.dispatcher)
            cluster.lose("D")
            assert cluster.nodes["P"].calls[1:] == [
                ("redirect", SequenceKey("r", 0), "E"),
                ("release", "D"),
            ]
            assert cluster.router.queries[-1].prefill_node == "P"
            cluster.run(caller)
            check_right(caller)
            cluster.check_empty()

    def test_the_only_decode_node(self) -> None:
        cluster = Cluster("P", "D")
        caller = cluster.submit()
        cluster.news("P", token_ids=(right_answer(caller.submission.specs[0])[0][0],))
        cluster.lose("D")
        assert ("redirect", SequenceKey("r", 0), None) in cluster.nodes["P"].calls

    def test_it_had_left_the_prefill_node_already(self) -> None:
        cluster = Cluster("P", "D E")
        caller = cluster.submit()
        source = cluster.nodes["P"]
        source.hear()
        source.work()
        source.speak(cluster.dispatcher)
        source.move(SequenceKey("r", 0))
        cluster.lose("D")
        cluster.run(caller)
        check_right(caller)
        assert cluster.attempt() == 1

    def test_a_node_takes_the_name_of_one_that_is_thought_alive(self) -> None:
        cluster = Cluster("A")
        caller = cluster.submit()
        cluster.nodes["A"].run(cluster.dispatcher)
        restarted = cluster.join("A")
        assert restarted.started == [SequenceKey("r", 1)]
        cluster.run(caller)
        check_right(caller)

    def test_a_lost_node_that_speaks_again_is_told_to_stop(self) -> None:
        cluster = Cluster("A B")
        caller = cluster.submit()
        hung = cluster.nodes["A"]
        hung.run(cluster.dispatcher)
        cluster.dispatcher.lose_node("A", "hung")
        hung.run(cluster.dispatcher)
        assert hung.is_empty
        cluster.run(caller)
        check_right(caller)

    def test_not_for_ever(self) -> None:
        cluster = Cluster("A", max_placements=3)
        caller = cluster.submit()
        for _ in range(3):
            cluster.nodes["A"].hear()
            cluster.join("A")
        assert isinstance(caller.error, GenerationError)
        assert "placed 3 times" in str(caller.error)
        cluster.check_empty()

    def test_an_unknown_node(self) -> None:
        cluster = Cluster()
        cluster.dispatcher.lose_node("nobody", "never seen")
        assert cluster.dispatcher.nodes == ("A",)


class TestFailedHandOffs:
    """The prefill node says it cannot get rid of a sequence."""

    def begin(self, decode: str, **options: Any) -> tuple[Cluster, Caller]:
        cluster = Cluster("P", decode, **options)
        caller = cluster.submit()
        cluster.news("P", token_ids=(97,))
        return cluster, caller

    def redirects(self, cluster: Cluster) -> list[Any]:
        return [call[2] for call in cluster.nodes["P"].calls if call[0] == "redirect"]

    def test_another_decode_node_then_the_prefill_node_itself(self) -> None:
        cluster, _ = self.begin("D E F")
        cluster.news("P", handoff_error="no room", decode_node="D")
        assert self.redirects(cluster) == ["E"]
        assert cluster.router.queries[-1].exclude == {"D"}
        cluster.news("P", handoff_error="no room", decode_node="E")
        assert self.redirects(cluster) == ["E", None]
        cluster.dispatcher.check()
        assert len(cluster.router.open) == 1

    def test_there_is_no_other(self) -> None:
        cluster, caller = self.begin("D")
        cluster.news("P", handoff_error="no room")
        assert self.redirects(cluster) == [None]
        cluster.news("P", start=1, token_ids=(98,), finish_reason="length")
        assert caller.last.finished
        assert not cluster.router.open

    def test_policy_fail(self) -> None:
        cluster, caller = self.begin("D E", kv_load_failure_policy="fail")
        cluster.news("P", handoff_error="bad checksum")
        assert isinstance(caller.error, GenerationError) and "bad checksum" in str(caller.error)
        cluster.check_empty()

    @pytest.mark.parametrize("n", [1, 2])
    def test_policy_fail_where_the_decode_node_is_lost(self, n: int) -> None:
        cluster = Cluster("P", "D E", kv_load_failure_policy="fail")
        caller = cluster.submit(n=n)
        cluster.lose("D")  # nothing was to be moved yet
        assert caller.error is None and self.redirects(cluster) == ["E"] * n
        sequence_id = "r" if n == 1 else "r#1"
        cluster.news("P", sequence_id, token_ids=(97,))
        cluster.lose("E")
        assert isinstance(caller.error, GenerationError) and "to E" in str(caller.error)
        cluster.check_empty()

    def test_it_has_been_redirected_meanwhile(self) -> None:
        cluster, _ = self.begin("D E F")
        cluster.lose("D")
        assert cluster.news("P", handoff_error="connection reset", decode_node="D") == []
        assert self.redirects(cluster) == ["E"]

    def test_only_the_acknowledgement_was_lost(self) -> None:
        cluster, caller = self.begin("D E")
        cluster.news("D", start=1, handoff=report("P", "D"))
        stop = StopOrder(SequenceKey("r", 0), "abort")
        assert cluster.news("P", handoff_error="timed out", decode_node="D") == [stop]
        assert self.redirects(cluster) == []
        cluster.news("D", start=1, token_ids=(98,))
        assert caller.told() == [97, 98]

    def test_the_acknowledgement_was_lost_and_the_answer_too_late(self) -> None:
        cluster, _ = self.begin("D E")
        cluster.news("P", handoff_error="timed out", decode_node="D")
        stop = StopOrder(SequenceKey("r", 0), "abort")
        assert cluster.news("D", start=1, handoff=report("P", "D")) == [stop]

    def test_the_decode_node_fails_before_it_has_it(self) -> None:
        cluster, caller = self.begin("D E")
        cluster.news("D", error=GenerationError("a step failed"))
        assert self.redirects(cluster) == ["E"] and caller.error is None


class TestErrors:
    def test_an_error_of_one_answer_ends_the_request(self) -> None:
        cluster = Cluster()
        caller = cluster.submit(n=2)
        cluster.nodes["A"].run(cluster.dispatcher)
        error = GenerationError("a step failed")
        cluster.news("A", "r#1", error=error)
        assert caller.error is error
        cluster.check_empty()

    def test_an_error_where_it_has_left_matters_only_for_tokens_not_told(self) -> None:
        for num_told in (0, 1):
            cluster = Cluster("P Q", "D")
            caller = cluster.submit()
            cluster.news("D", start=1, handoff=report("P", "D"))
            cluster.news("D", start=1, token_ids=(98,))
            if num_told:
                cluster.news("P", token_ids=(97,))
            cluster.news("P", error=GenerationError("a step failed"))
            assert caller.error is None
            assert len(cluster.nodes["Q"].started) == 1 - num_told

    @pytest.mark.parametrize("error", [RetryableRequestError("full"), EngineDeadError("dead")])
    def test_elsewhere_if_that_may_help(self, error: Exception) -> None:
        cluster = Cluster("A B")
        caller = cluster.submit()
        cluster.nodes["A"].hear()
        cluster.nodes["A"].held.clear()
        cluster.news("A", error=error)
        assert cluster.router.queries[-1].exclude == {"A"}
        cluster.run(caller)
        check_right(caller)
        cluster.check_empty()

    def test_refused_at_the_start(self) -> None:
        cluster = Cluster()
        error = ValidationError("prompt is too long")
        cluster.nodes["A"].refusals.append(error)
        caller = cluster.submit()
        assert caller.accepted is not None and not caller.accepted.done()
        cluster.nodes["A"].hear()
        assert refusal(caller) is error
        assert caller.error is None and not caller.outputs
        cluster.check_empty()

    def test_refused_by_one_and_taken_by_another(self) -> None:
        cluster = Cluster("A B")
        cluster.nodes["A"].refusals.append(QueueOverflowError("full"))
        caller = cluster.submit()
        cluster.run(caller)
        check_right(caller)

    def test_refused_by_everybody_again_and_again(self) -> None:
        cluster = Cluster(max_placements=3)
        errors = [QueueOverflowError(f"full {i}") for i in range(3)]
        cluster.nodes["A"].refusals.extend(errors)
        caller = cluster.submit()
        for _ in range(3):
            cluster.nodes["A"].hear()
            cluster.dispatcher.tick()
        assert caller.error is errors[-1]
        cluster.check_empty()

    def test_a_port_that_raises(self) -> None:
        class Broken(ScriptedNode):
            def start(self, specs: Any) -> Future[None]:
                raise EngineDeadError("the connection is closed")

        cluster = Cluster("A B")
        cluster.dispatcher.add_node(Broken("A", cluster.nodes))
        caller = cluster.submit()
        cluster.run(caller)
        check_right(caller)

    def test_a_sink_that_raises(self) -> None:
        cluster = Cluster()
        caller, other = new_caller(), cluster.submit("other")

        def fail(item: object) -> None:
            raise RuntimeError("nobody listens")

        caller.submission.sink = fail
        cluster.dispatcher.submit(caller.submission)
        cluster.run(other)
        check_right(other)

    def test_fail_all_and_close(self) -> None:
        cluster = Cluster()
        caller = cluster.submit()
        cluster.nodes["A"].run(cluster.dispatcher)
        error = EngineDeadError("every node is gone")
        cluster.dispatcher.fail_all(error)
        assert caller.error is error
        second = cluster.submit()
        closed = EngineDeadError("shut down")
        cluster.dispatcher.close(closed)
        assert second.last.outputs[0].finish_reason == "abort"
        assert refusal(cluster.submit("third")) is closed
        cluster.check_empty()


class TestWaitingForAPlace:
    def test_until_a_node_joins(self) -> None:
        cluster = Cluster("", "")
        late = cluster.submit("late", arrival_s=2.0)
        early = cluster.submit("early", arrival_s=1.0)
        assert refusal(late) is None and cluster.dispatcher.num_pending == 2
        cluster.router.prefill = ["A"]
        node = cluster.join("A")
        assert [key.sequence_id for key in node.started] == ["early", "late"]
        cluster.run(late, early)
        check_right(late)
        check_right(early)

    def test_until_another_ends_or_a_tick(self) -> None:
        cluster = Cluster("A")
        first = cluster.submit("first", max_tokens=1)
        cluster.router.prefill = []
        waiting = [cluster.submit(name) for name in ("second", "third")]
        cluster.router.prefill = ["A"]
        cluster.run(first)
        assert cluster.dispatcher.num_pending == 0
        cluster.run(*waiting)
        cluster.router.prefill = []
        last = cluster.submit("last")
        cluster.dispatcher.tick()
        assert cluster.dispatcher.num_pending == 1
        cluster.router.prefill = ["A"]
        cluster.dispatcher.tick()
        cluster.run(last)
        cluster.check_empty()

    def test_no_longer_than_its_deadline(self) -> None:
        cluster = Cluster("")
        caller = cluster.submit(deadline_s=5.0)
        cluster.clock.now_s = 4.9
        cluster.dispatcher.tick()
        assert caller.error is None
        cluster.clock.now_s = 5.0
        cluster.dispatcher.tick()
        assert isinstance(caller.error, DeadlineExceeded)
        assert "after 5.000 s and 0 output tokens" in str(caller.error)
        cluster.check_empty()

    def test_a_router_that_has_not_heard_of_a_loss(self) -> None:
        cluster = Cluster("A B")
        cluster.dispatcher.lose_node("A", "dead")
        caller = cluster.submit()
        assert cluster.nodes["B"].started == [SequenceKey("r", 0)]
        cluster.run(caller)
        cluster.check_empty()


class TestAdmission:
    def test_requests(self) -> None:
        cluster = Cluster(max_waiting_requests=2)
        first = cluster.submit("a", n=3)
        cluster.submit("b")
        error = refusal(cluster.submit("c"))
        assert isinstance(error, QueueOverflowError)
        assert "max_waiting_requests=2" in str(error) and error.retry_after_s == 1.0
        cluster.news("A", "a", token_ids=(97,))
        assert cluster.dispatcher.num_waiting == 1
        assert refusal(cluster.submit("c"), may_wait=True) is None
        assert first.told() == [97]

    def test_tokens(self) -> None:
        cluster = Cluster(max_waiting_tokens=5)
        cluster.submit("long", prompt=range(1, 10))  # alone it is let in
        error = refusal(cluster.submit("b", prompt=[1]))
        assert isinstance(error, MaxQueuedTokensError)
        assert "9 prompt tokens wait and this request has 1, max_waiting_tokens=5" in str(error)
        assert error.retry_after_s is not None
        cluster.dispatcher.abort(["long"])
        assert refusal(cluster.submit("b", prompt=[1]), may_wait=True) is None


class TestCallingBack:
    """Sinks, ports and garbage collections come back in the middle of things."""

    def test_a_sink_aborts_submits_and_withdraws(self) -> None:
        cluster = Cluster()
        others = [new_caller("after"), new_caller("withdrawn")]

        def react(caller: Caller) -> None:
            if len(caller.outputs) == 1:
                for other in others:
                    other.accepted = cluster.dispatcher.submit(other.submission)
                cluster.dispatcher.withdraw([others[1].submission])
                cluster.dispatcher.abort(["r"])

        caller = new_caller()
        caller.then = react
        caller.accepted = cluster.dispatcher.submit(caller.submission)
        cluster.run(caller, *others)
        assert caller.last.outputs[0].finish_reason == "abort"
        assert others[1].last.outputs[0].finish_reason == "abort"
        check_right(others[0])
        cluster.check_empty()

    def test_a_port_that_delivers_while_it_is_called(self) -> None:
        class Instant(ScriptedNode):
            def start(self, specs: Any) -> Future[None]:
                answer = super().start(specs)
                for _ in range(3):
                    self.run(cluster.dispatcher)
                return answer

        cluster = Cluster()
        cluster.dispatcher.add_node(Instant("A", cluster.nodes))
        callers = [cluster.submit(name, n=2) for name in ("a", "b")]
        cluster.run(*callers)
        for caller in callers:
            check_right(caller)
        cluster.check_empty()

    def test_a_garbage_collection_withdraws_in_the_middle_of_a_change(self) -> None:
        cluster = Cluster()
        dropped = cluster.submit("dropped")
        place = cluster.router.place

        def collect(*args: Any) -> Any:
            assert cluster.dispatcher.withdraw([dropped.submission]) == 1
            return place(*args)

        cluster.router.place = collect  # type: ignore[method-assign]
        caller = cluster.submit()
        assert dropped.last.finished
        cluster.run(caller)
        check_right(caller)
        cluster.check_empty()

    def test_withdrawing_waits_for_no_lock(self) -> None:
        cluster = Cluster()
        caller, other = cluster.submit(), new_caller("other")
        cluster.nodes["A"].hear()
        is_inside, may_go_on = threading.Event(), threading.Event()

        def dally(_: Caller) -> None:
            is_inside.set()
            assert may_go_on.wait(30)

        other.then = dally
        cluster.dispatcher.submit(other.submission)
        holder = threading.Thread(target=cluster.dispatcher.abort, args=(["other"],))
        holder.start()
        assert is_inside.wait(30)
        cluster.dispatcher.withdraw([caller.submission])  # would deadlock if it waited
        assert not caller.is_done
        may_go_on.set()
        holder.join()
        assert caller.last.outputs[0].finish_reason == "abort"

    def test_threads(self) -> None:
        cluster = Cluster("P Q", "D E")
        is_over = threading.Event()

        def serve(node: ScriptedNode) -> None:
            while not is_over.is_set() and not node.is_dead:
                node.hear()
                node.work()
                while node.news:
                    node.speak(cluster.dispatcher)
                time.sleep(0)

        # Hand-offs reach into other nodes, so in this test everybody decodes where he prefills.
        cluster.router.prefill, cluster.router.decode = ["P", "Q", "D", "E"], []
        cluster.router.lot = random.Random(1)
        threads = [threading.Thread(target=serve, args=(n,)) for n in cluster.nodes.values()]
        for thread in threads:
            thread.start()
        callers = [cluster.submit(f"r{i}", seed=i, max_tokens=12) for i in range(40)]
        cluster.nodes["P"].is_dead = True
        cluster.router.prefill = ["Q", "D", "E"]
        cluster.dispatcher.lose_node("P", "killed")
        limit_s = time.monotonic() + 30
        while not all(caller.is_done for caller in callers) and time.monotonic() < limit_s:
            time.sleep(0.001)
        is_over.set()
        for thread in threads:
            thread.join()
        for caller in callers:
            check_right(caller)
        cluster.check_empty()


class TestWhatIsTold:
    def test_events_and_records(self) -> None:
        events: list[DispatchEvent] = []
        cluster = Cluster("P Q", "D", on_event=events.append)
        caller = cluster.submit()
        cluster.lose("P")
        cluster.clock.now_s = 1.0
        cluster.run(caller)
        kinds = DispatchEventKind
        assert [(event.kind, event.node) for event in events] == [
            (kinds.PLACED, "P"),
            (kinds.LOST_PLACE, "P"),
            (kinds.PLACED, "Q"),
            (kinds.FIRST_TOKEN, "Q"),
            (kinds.HANDED_OFF, "D"),
            (kinds.ENDED, "D"),
        ]
        assert events[1].reason == "killed"
        (record,) = cluster.dispatcher.finished_records()
        assert (record.num_placements, record.handoff) == (2, report("Q", "D"))
        assert record.lost_places == (LostPlace("P", "D", "P", 0.0, "killed"),)
        assert record.handed_off_s == 1.0
        assert (record.queue_s, record.prefill_s) == (0.5, 0.5)
        assert record.num_output_tokens == len(caller.told())


def refusal(caller: Caller, *, may_wait: bool = False) -> BaseException | None:
    """What the request was refused with; None if it was accepted."""
    assert caller.accepted is not None
    if may_wait and not caller.accepted.done():
        return None
    return caller.accepted.exception(timeout=0)

    def test_records_are_numbered_and_read_in_pages(self) -> None:
        cluster = Cluster(num_records=4)
        assert cluster.dispatcher.records_since(None, 3) == []
        for i in range(7):
            cluster.run(cluster.submit(f"r{i}"))
        since = cluster.dispatcher.records_since

        def numbers(number: int | None, limit: int) -> list[int]:
            return [record.number for record in since(number, limit)]

        assert [record.request_id for record in since(None, 9)] == ["r3", "r4", "r5", "r6"]
        assert numbers(None, 9) == [4, 5, 6, 7]
        assert numbers(None, 2) == [6, 7]
        assert numbers(0, 2) == [4, 5]
        assert numbers(5, 9) == [6, 7]
        assert numbers(7, 9) == numbers(99, 9) == numbers(None, 0) == numbers(2, 0) == []
        with pytest.raises(ValueError, match="limit=-1"):
            since(None, -1)


class TestNodesOfOtherServers:
    """P is lent: the router does not know it, and it is to compute the prompts of those who ask."""

    def cluster(self, **options: Any) -> Cluster:
        cluster = Cluster("A", **options)
        cluster.join("P")
        return cluster

    def borrow(self, cluster: Cluster, **options: Any) -> Caller:
        caller = new_caller(**options)
        caller.submission.prefill_node = "P"
        caller.accepted = cluster.dispatcher.submit(caller.submission)
        return caller

    def test_prefills_for_those_who_ask_and_hands_off(self) -> None:
        cluster = self.cluster()
        caller, other = self.borrow(cluster, n=2), cluster.submit("other")
        cluster.run(caller, other)
        check_right(caller)
        check_right(other)
        assert [key.sequence_id for key in cluster.nodes["P"].started] == ["r", "r#1"]
        assert [key.sequence_id for key in cluster.nodes["A"].started] == ["other"]
        assert all(spec.decode_node == "A" for spec in cluster.nodes["P"].specs)
        cluster.check_empty()

    def test_one_that_is_not_there_is_not_waited_for(self) -> None:
        cluster = Cluster("A")
        caller = self.borrow(cluster)
        cluster.run(caller)
        check_right(caller)

    @pytest.mark.parametrize("phase", ["refuses", "fails", "cannot hand off", "is lost", "late"])
    @pytest.mark.parametrize("policy", ["recompute", "fail"])
    def test_what_it_does_not_do_is_done_here_once(self, phase: str, policy: str) -> None:
        cluster = self.cluster(kv_load_failure_policy=policy)
        lent = cluster.nodes["P"]
        if phase == "refuses":
            lent.refusals.append(ValidationError("its context is shorter"))
        caller = self.borrow(cluster)
        lent.hear()
        lent.work()
        if phase == "cannot hand off":
            [key] = lent.held
            for _ in range(2):
                if key in lent.held:
                    lent.move(key, "refused")
                while lent.news:
                    lent.speak(cluster.dispatcher)
                lent.hear()
        elif phase == "is lost":
            lent.speak(cluster.dispatcher)
            cluster.lose("P")
        elif phase == "fails":
            cluster.news("P", error=GenerationError("a step failed"))
            lent.held.clear()
        elif phase == "late":
            cluster.news("P", error=RetryableRequestError("takes too long"))
            lent.held.clear()
        if policy == "fail":
            error = caller.error or caller.accepted.exception(0)  # type: ignore[union-attr]
            assert isinstance(error, GenerationError)
            assert "kv_load_failure_policy=fail" in str(error)
        else:
            cluster.run(caller)
            check_right(caller)
            assert len(cluster.nodes["A"].started) == len(lent.started) == 1
        retries = [call for call in lent.calls if call[0] == "redirect"]
        is_asked_again = phase == "cannot hand off" and policy == "recompute"
        assert retries == ([("redirect", lent.started[0], "A")] if is_asked_again else [])
        cluster.check_empty()

    def test_it_may_only_lack_room_for_a_while(self) -> None:
        cluster = self.cluster()
        caller = self.borrow(cluster)
        lent = cluster.nodes["P"]
        lent.hear()
        lent.work()
        [key] = lent.held
        lent.move(key, "refused")
        cluster.run(caller)
        check_right(caller)
        assert len(cluster.nodes["A"].started) == 0
        cluster.check_empty()

    def test_its_loss_after_the_hand_off_is_nothing(self) -> None:
        cluster = self.cluster(kv_load_failure_policy="fail")
        caller = self.borrow(cluster)
        cluster.nodes["P"].run(cluster.dispatcher)
        cluster.nodes["A"].run(cluster.dispatcher)
        cluster.news("P", error=RetryableRequestError("takes too long"))
        cluster.lose("P")
        cluster.run(caller)
        check_right(caller)
        assert len(cluster.nodes["A"].started) == 0
        cluster.check_empty()

    def test_loss_of_the_decode_node_is_not_its_to_mend(self) -> None:
        cluster = self.cluster()
        caller = self.borrow(cluster)
        cluster.nodes["P"].hear()
        cluster.lose("A")
        cluster.join("B")
        cluster.router.prefill.append("B")
        cluster.dispatcher.tick()
        cluster.run(caller)
        check_right(caller)
        assert cluster.nodes["P"].calls[1][0] == "stop"
        cluster.check_empty()

    def test_a_deadline_is_one_everywhere(self) -> None:
        cluster = self.cluster()
        caller = self.borrow(cluster, deadline_s=5.0)
        cluster.nodes["P"].hear()
        cluster.nodes["P"].held.clear()
        cluster.news("P", error=DeadlineExceeded("too late"))
        assert isinstance(caller.error, DeadlineExceeded)
        cluster.check_empty()
