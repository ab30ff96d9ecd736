"""The tables of legal moves, the pins, and the line between two halves."""

from __future__ import annotations

import threading

import pytest

from transfer.errors import (
    BlocksBusy,
    Cancelled,
    ChecksumMismatch,
    DeadlineExceeded,
    PeerLost,
    ProtocolError,
    TransferError,
    from_wire,
    to_wire,
)
from transfer.leg_link import MAX_WAITING_NOTES, LegLink
from transfer.lifecycle import LEG_MOVES, TRANSFER_MOVES, LegState, TransferState, moved
from transfer.parallel import in_parallel
from transfer.pins import Pins
from transfer.testing import ManualClock


class TestTables:
    @pytest.mark.parametrize(
        ("states", "table"), [(TransferState, TRANSFER_MOVES), (LegState, LEG_MOVES)]
    )
    def test_every_state_is_in_its_table_and_reaches_an_end(self, states, table) -> None:  # type: ignore[no-untyped-def]
        assert set(table) == set(states)
        for state in states:
            reached, todo = set(), [state]
            while todo:
                now = todo.pop()
                if now not in reached:
                    reached.add(now)
                    todo.extend(table[now])
            assert any(end.is_final for end in reached)

    def test_final_states_have_no_way_out(self) -> None:
        finals = {state for state in TransferState if state.is_final}
        assert finals == {TransferState.COMPLETED, TransferState.FAILED, TransferState.CANCELLED}
        with pytest.raises(RuntimeError, match="illegal move COMPLETED -> MOVING"):
            moved(TransferState.COMPLETED, TransferState.MOVING)

    def test_nothing_fails_without_the_fence(self) -> None:
        for state, moves in TRANSFER_MOVES.items():
            if state is not TransferState.SETTLING:
                assert not moves & {TransferState.FAILED, TransferState.CANCELLED}
        assert moved(LegState.OFFERED, LegState.STOPPED) is LegState.STOPPED


class TestErrors:
    def test_they_cross_a_channel(self) -> None:
        error = from_wire(*to_wire(ChecksumMismatch("both differ")))
        assert isinstance(error, ChecksumMismatch) and error.can_retry
        assert str(error) == "both differ"

    def test_foreign_ones_are_told_as_a_backends(self) -> None:
        assert to_wire(KeyError("x")) == ("BackendError", "KeyError: 'x'")
        assert type(from_wire("NoSuchError", "text")) is TransferError


class TestPins:
    def test_many_readers_or_one_writer(self) -> None:
        pins = Pins("a", 16)
        pins.read([(0, 4)])
        pins.read([(2, 4)])
        with pytest.raises(BlocksBusy, match="block 5 of a is being read"):
            pins.write("t", [(8, 2), (5, 1)])
        assert pins.pinned(range(16)) == [0, 1, 2, 3, 4, 5]
        pins.write("t", [(8, 2)])
        pins.write("t", [(9, 3)])
        with pytest.raises(BlocksBusy, match="block 9 of a is being written"):
            pins.write("u", [(9, 1)])
        with pytest.raises(BlocksBusy, match="block 8 of a is being written"):
            pins.read([(6, 4)])
        pins.unpin_read([(0, 4)])
        pins.unpin_write("t")
        pins.unpin_write("t")
        assert pins.pinned(range(16)) == [2, 3, 4, 5]
        pins.unpin_read([(2, 4)])
        assert pins.num_pinned == 0


class TestLink:
    def test_notes_come_in_order_and_before_the_end(self) -> None:
        link = LegLink(lambda body: None, ManualClock(), None)
        link.deliver(b"1")
        link.deliver(b"2")
        link.stop(Cancelled("over"))
        link.stop(PeerLost("too late"))
        assert link.get() == b"1" and link.get() == b"2"
        with pytest.raises(Cancelled):
            link.get()
        with pytest.raises(Cancelled):
            link.put(b"x")

    def test_deadline_and_time_out(self) -> None:
        clock = ManualClock()
        link = LegLink(lambda body: None, clock, clock() + 5)
        with pytest.raises(TimeoutError, match="within 0 s"):
            link.get(0)
        clock.advance(5)
        with pytest.raises(DeadlineExceeded):
            link.get()

    def test_stopping_wakes(self) -> None:
        link = LegLink(lambda body: None, ManualClock(), None)
        woken: list[str] = []
        link.on_stop(lambda: woken.append("before"))
        timer = threading.Timer(0.02, link.stop, [PeerLost("gone")])
        timer.start()
        with pytest.raises(PeerLost):
            link.get()
        timer.join()
        link.on_stop(lambda: woken.append("after"))
        assert woken == ["before", "after"]

    def test_notes_are_bounded(self) -> None:
        link = LegLink(lambda body: None, ManualClock(), None)
        for _ in range(MAX_WAITING_NOTES + 1):
            link.deliver(b"")
        with pytest.raises(ProtocolError):
            link.check()


class TestParallel:
    def test_the_first_error_once_all_have_ended(self) -> None:
        ended: list[int] = []
        stopped = threading.Event()

        def waits() -> None:
            stopped.wait(10)
            ended.append(1)

        def fails() -> None:
            raise KeyError("first")

        with pytest.raises(KeyError, match="first"):
            in_parallel([waits, fails, waits], stopped.set)
        assert ended == [1, 1]
