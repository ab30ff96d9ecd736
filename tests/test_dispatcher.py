"""The dispatcher, told as what its callers and nodes can rely on."""

from __future__ import annotations

from typing import Any

from flowkv_jax.cluster.dispatcher import Dispatcher
from flowkv_jax.errors import DuplicateRequestError
from tests.scripted_nodes import Caller, ScriptedNode, ScriptedRouter, new_caller, right_answer


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

    def submit(self, *args: Any, **kwargs: Any) -> Caller:
        caller = new_caller(*args, **kwargs)
        caller.accepted = self.dispatcher.submit(caller.submission)
        return caller

    def run(self, *callers: Caller) -> None:
        """Until these callers are done, and the nodes have nothing left to do."""
        for _ in range(100):
            for node in self.nodes.values():
                if not node.is_dead:
                    node.run(self.dispatcher)
            self.dispatcher.check()
            if all(caller.is_done for caller in callers):
                break
        for caller in callers:
            assert caller.is_done

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
    def test_tokens_come_in_order_and_the_end_once(self) -> None:
        cluster = Cluster()
        caller = cluster.submit()
        cluster.run(caller)
        check_right(caller)
        cluster.check_empty()

    def test_answers_of_one_request(self) -> None:
        cluster = Cluster()
        caller = cluster.submit(n=3)
        cluster.run(caller)
        check_right(caller)
        cluster.check_empty()

    def test_stop_string_ends_the_sequence_at_the_node(self) -> None:
        cluster = Cluster()
        text = right_answer(new_caller(max_tokens=30).submission.specs[0])[1]
        caller = cluster.submit(max_tokens=30, stop=text[2:4])
        cluster.run(caller)
        check_right(caller)
        (order,) = cluster.nodes["A"].orders
        assert (order.key.sequence_id, order.finish_reason, order.stop_reason) == (
            "r",
            "stop",
            text[2:4],
        )
        cluster.check_empty()

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
        assert second.accepted is not None
        assert isinstance(second.accepted.exception(timeout=0), DuplicateRequestError)
        assert cluster.dispatcher.withdraw([second.submission]) == 0
        cluster.run(first)
        check_right(first)
        assert not second.outputs


class TestPrefillAndDecode:
    def test_hand_off(self) -> None:
        cluster = Cluster("P", "D")
        caller = cluster.submit()
        cluster.run(caller)
        check_right(caller)
        assert cluster.router.moved_ones == cluster.router.prefilled_ones == {0}
        cluster.check_empty()
