"""What every backend between two JAX processes must do; one subclass a backend.

`here` sends to `there`. Both are told what to do (`tests.transfer_backend_peer`), and at least one
is a process of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import ClassVar

import pytest

from tests.transfer_backend_peer import FRAGMENTED, LAYOUT, Told, ids_of

NUM_MOVED = sum(count for _, _, count in FRAGMENTED)
UNTOUCHED = sorted(set(range(64)) - set(ids_of(FRAGMENTED, of_source=False)))
Step = tuple[str, int]


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    ends_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > ends_s:
            return False
        time.sleep(0.01)
    return True


def assert_same(here: Told, src: str, there: Told, dst: str) -> None:
    sent = here.crc(src, ids_of(FRAGMENTED, of_source=True))
    assert there.crc(dst, ids_of(FRAGMENTED, of_source=False)) == sent


class TransferBackendSuite:
    """Nodes are "a" and "b", with plain host memory, and those named in `sources`, `destinations`.

    Attributes:
        cancel_steps: where the destination stands still when the source cancels.
        kills_of_destination, kills_of_source: where a process stands still when it is killed.
    """

    sources: ClassVar[list[str]] = ["a"]
    destinations: ClassVar[list[str]] = ["b"]
    cancel_steps: ClassVar[list[Step]] = [("receive", 1)]
    kills_of_destination: ClassVar[list[Step]] = [("receive", 1)]
    kills_of_source: ClassVar[list[Step]] = []

    def new_peer(self, nodes: dict[str, str]) -> AbstractContextManager[Told]:
        """A process that can be killed."""
        raise NotImplementedError

    def test_fragmented_runs_between_every_two_kinds_of_pool(self, here: Told, there: Told) -> None:
        for src in self.sources:
            for dst in self.destinations:
                there.overwrite(dst, 3)
                others = there.crc(dst, UNTOUCHED)
                calls = here.metric_calls()
                done = here.wait(here.submit(src, dst, FRAGMENTED, "aligned-runs", True))
                assert done == ["completed", "NoneType", "None", len(FRAGMENTED)], (src, dst)
                assert here.metric_calls() - calls == len(FRAGMENTED)
                assert_same(here, src, there, dst)
                assert there.crc(dst, UNTOUCHED) == others

    def test_the_other_way_round(self, here: Told, there: Told) -> None:
        done = there.wait(there.submit("b", "a", FRAGMENTED, "aligned-runs", True))
        assert done == ["completed", "NoneType", "None", len(FRAGMENTED)]
        assert_same(there, "b", here, "a")

    def test_both_ways_at_once(self, here: Told, there: Told) -> None:
        forth = [(i, 32 + i, 1) for i in range(16)]
        back = [(16 + i, 48 + i, 1) for i in range(16)]
        transfers = [
            (teller, teller.submit(src, dst, runs[i : i + 4], "aligned-runs", True))
            for i in range(0, 16, 4)
            for teller, src, dst, runs in ((here, "a", "b", forth), (there, "b", "a", back))
        ]
        for teller, transfer in transfers:
            assert teller.wait(transfer)[0] == "completed"

    @pytest.mark.parametrize(
        ("strategy", "calls"),
        [("block-major", NUM_MOVED), ("layer-major", NUM_MOVED * 2 * LAYOUT.num_layers)],
    )
    def test_calls_of_the_other_strategies(
        self, here: Told, there: Told, strategy: str, calls: int
    ) -> None:
        there.overwrite("b", 4)
        done = here.wait(here.submit("a", "b", FRAGMENTED, strategy, True))
        assert done == ["completed", "NoneType", "None", calls]
        assert_same(here, "a", there, "b")

    def test_generations_are_checked_after_the_bytes(self, here: Told, there: Told) -> None:
        there.pause("receive", 1)
        transfer = here.submit("a", "b", FRAGMENTED, "aligned-runs", False, None, 0)
        assert there.paused()
        here.free_all()
        there.resume()
        state, kind, text, _ = here.wait(transfer)
        assert (state, kind) == ("failed", "StaleGeneration")
        assert "was freed" in text
        there.free_all()
        transfer = here.submit("a", "b", FRAGMENTED, "aligned-runs", False, None, 1)
        assert here.wait(transfer)[0] == "completed"

    def test_cancel(self, here: Told, there: Told) -> None:
        for step in self.cancel_steps:
            there.pause(*step)
            transfer = here.submit("a", "b", FRAGMENTED)
            assert there.paused(), step
            here.cancel(transfer)
            assert wait_until(there.is_stopped)
            there.resume()
            assert here.wait(transfer)[0] == "cancelled", step
            assert wait_until(lambda: here.num_pinned() == there.num_pinned() == 0)
        assert here.wait(here.submit("a", "b", FRAGMENTED, "aligned-runs", True))[0] == "completed"
        assert_same(here, "a", there, "b")

    def test_a_deadline_ends_the_wait_for_a_slow_peer(self, here: Told, there: Told) -> None:
        there.pause("receive", 1)
        transfer = here.submit("a", "b", FRAGMENTED, "aligned-runs", False, 0.2)
        assert there.paused()
        assert wait_until(there.is_stopped)
        there.resume()
        assert here.wait(transfer)[:2] == ["failed", "DeadlineExceeded"]
        assert wait_until(lambda: here.num_pinned() == there.num_pinned() == 0)

    def test_destination_is_killed(self, here: Told) -> None:
        for i, step in enumerate(self.kills_of_destination):
            node = f"killed-destination-{i}"
            with self.new_peer({node: "numpy"}) as peer:
                peer.connect(*here.listen())
                assert wait_until(lambda name=node: here.knows(name))
                assert here.wait(here.submit("a", node, [(0, 0, 1)]))[0] == "completed"
                peer.pause(*step)
                transfer = here.submit("a", node, FRAGMENTED)
                assert peer.paused(), step
                peer.kill()
                assert here.wait(transfer)[:2] == ["failed", "PeerLost"], step
            assert here.num_pinned() == 0

    def test_source_is_killed(self, here: Told) -> None:
        for i, step in enumerate(self.kills_of_source):
            node = f"killed-source-{i}"
            with self.new_peer({node: "numpy"}) as peer:
                peer.connect(*here.listen())
                here.arrivals()
                assert peer.wait(peer.submit(node, "a", [(0, 0, 1)]))[0] == "completed"
                assert wait_until(lambda: here.arrivals() == [["completed", "NoneType"]])
                who = here if step[0] == "receive" else peer
                who.pause(*step)
                peer.submit(node, "a", FRAGMENTED)
                assert who.paused(), step
                peer.kill()
                here.resume()
            assert wait_until(lambda: here.arrivals() == [["failed", "PeerLost"]]), step
            assert here.num_pinned() == 0
