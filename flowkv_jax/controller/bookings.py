"""The load that was given to nodes and is not done: counted from the moment it is given.

A booking has a share at its prefill node and one at its decode node (one node may be both):

    state        prefill node holds                     decode node holds
    PREFILLING   a prompt to compute, its blocks        a sequence to come, blocks with room to grow
    SENDING      a prompt computed, its blocks          the same
    DECODING     nothing                                a sequence, the same blocks
    ENDED        nothing                                nothing

    PREFILLING -> SENDING     the first token came, and it is decoded elsewhere
    PREFILLING -> DECODING    the first token came, and it stays; or its arrival was heard of first
    SENDING    -> DECODING    it came to its decode node
    any        -> ENDED

Blocks are booked once where both nodes are one. When a node leaves, its share is gone; the other
share stays until the sequence ends. Whoever tells of a step twice, or late, changes nothing.
The ledger owns the bookings and the `booked_*` columns of the node table.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from flowkv_jax.controller.node_table import NodeTable


class BookingState(enum.Enum):
    PREFILLING = "prefilling"
    SENDING = "sending"
    DECODING = "decoding"
    ENDED = "ended"


_NEXT: dict[BookingState, frozenset[BookingState]] = {
    BookingState.PREFILLING: frozenset(
        {BookingState.SENDING, BookingState.DECODING, BookingState.ENDED}
    ),
    BookingState.SENDING: frozenset({BookingState.DECODING, BookingState.ENDED}),
    BookingState.DECODING: frozenset({BookingState.ENDED}),
    BookingState.ENDED: frozenset(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BookedWork:
    """What a placement asks of its nodes.

    Attributes:
        prefill_slot, decode_slot: of the node table.
        prefill_tokens, prefill_us: prompt tokens to compute, and the time predicted for it.
        prompt_blocks: at the prefill node.
        total_blocks: at the decode node, with room to grow.
        is_prefilled: the prompt was computed before; it only has to move.
    """

    prefill_slot: int
    decode_slot: int
    prefill_tokens: int
    prefill_us: int
    prompt_blocks: int
    total_blocks: int
    is_prefilled: bool = False


@dataclass(eq=False, slots=True)
class _Booking:
    work: BookedWork
    state: BookingState
    prefill_slot: int | None
    decode_slot: int | None

    @property
    def stays(self) -> bool:
        return self.work.prefill_slot == self.work.decode_slot


class BookingLedger:
    """Bookings by number, and their sums in the node table."""

    def __init__(self, table: NodeTable) -> None:
        self._table = table
        self._next = 1
        self._bookings: dict[int, _Booking] = {}
        self._at: dict[int, dict[int, None]] = {}
        self._prefilling: dict[int, dict[int, None]] = {}

    def __len__(self) -> int:
        return len(self._bookings)

    def __contains__(self, number: int) -> bool:
        return number in self._bookings

    def add(self, work: BookedWork, now_s: float) -> int:
        """Book work at its nodes; returns the booking's number."""
        number = self._next
        self._next += 1
        state = BookingState.PREFILLING
        if work.is_prefilled:
            moves = work.prefill_slot != work.decode_slot
            state = BookingState.SENDING if moves else BookingState.DECODING
        source = None if state is BookingState.DECODING else work.prefill_slot
        booking = _Booking(work, state, source, work.decode_slot)
        self._bookings[number] = booking
        for slot in {work.prefill_slot, work.decode_slot}:
            self._at.setdefault(slot, {})[number] = None
        self._count_prefill(number, booking, 1, now_s)
        self._count_decode(booking, 1)
        return number

    def prefilled(self, number: int, now_s: float) -> bool:
        """The prompt was computed; False if that changes nothing."""
        booking = self._bookings.get(number)
        if booking is None or booking.state is not BookingState.PREFILLING:
            return False
        state = BookingState.DECODING if booking.stays else BookingState.SENDING
        self._move(number, booking, state, now_s)
        return True

    def moved(self, number: int, now_s: float) -> bool:
        """The sequence came to its decode node; False if that changes nothing."""
        booking = self._bookings.get(number)
        if booking is None or BookingState.DECODING not in _NEXT[booking.state]:
            return False
        self._move(number, booking, BookingState.DECODING, now_s)
        return True

    def ended(self, number: int, now_s: float) -> bool:
        """Nothing of it is to be done any more; False if it had ended before."""
        booking = self._bookings.get(number)
        if booking is None:
            return False
        self._move(number, booking, BookingState.ENDED, now_s)
        return True

    def leave(self, slot: int, now_s: float) -> None:
        """A node is gone: drop its shares, and bookings that have no other."""
        for number in list(self._at.pop(slot, ())):
            booking = self._bookings[number]
            if booking.prefill_slot == slot:
                self._count_prefill(number, booking, -1, now_s)
            if booking.decode_slot == slot:
                self._count_decode(booking, -1)
                booking.decode_slot = None
            if booking.prefill_slot == slot:
                booking.prefill_slot = None
            self._drop_if_empty(number, booking)
        self._prefilling.pop(slot, None)

    def _move(self, number: int, booking: _Booking, state: BookingState, now_s: float) -> None:
        if state not in _NEXT[booking.state]:
            raise RuntimeError(f"booking {number}: {booking.state} to {state} is no legal move")
        self._count_prefill(number, booking, -1, now_s)
        booking.state = state
        if state is BookingState.SENDING:
            self._count_prefill(number, booking, 1, now_s)
            return
        if state is BookingState.ENDED:
            self._count_decode(booking, -1)
            self._release(number, booking.decode_slot)
            booking.decode_slot = None
        if booking.prefill_slot != booking.decode_slot:
            self._release(number, booking.prefill_slot)
        booking.prefill_slot = None
        self._drop_if_empty(number, booking)

    def _release(self, number: int, slot: int | None) -> None:
        if slot is not None:
            self._at[slot].pop(number, None)

    def _drop_if_empty(self, number: int, booking: _Booking) -> None:
        if booking.prefill_slot is None and booking.decode_slot is None:
            del self._bookings[number]

    def _count_prefill(self, number: int, booking: _Booking, sign: int, now_s: float) -> None:
        """Add a booking's share at its prefill node to the columns, or take it away."""
        table, work, slot = self._table, booking.work, booking.prefill_slot
        if slot is None:
            return
        if booking.state is BookingState.PREFILLING:
            table.booked_prefills[slot] += sign
            table.booked_prefill_tokens[slot] += sign * work.prefill_tokens
            table.booked_prefill_us[slot] += sign * work.prefill_us
            self._queue(number, slot, sign, now_s)
        elif booking.state is BookingState.SENDING:
            table.booked_sends[slot] += sign
        if not booking.stays:
            table.booked_blocks[slot] += sign * work.prompt_blocks

    def _count_decode(self, booking: _Booking, sign: int) -> None:
        slot = booking.decode_slot
        if slot is not None:
            self._table.booked_decodes[slot] += sign
            self._table.booked_blocks[slot] += sign * booking.work.total_blocks

    def _queue(self, number: int, slot: int, sign: int, now_s: float) -> None:
        """Keep the node's prompts in order, and who of them is computed now."""
        queue = self._prefilling.setdefault(slot, {})
        head = next(iter(queue), None)
        if sign > 0:
            queue[number] = None
        else:
            queue.pop(number, None)
        new_head = next(iter(queue), None)
        if new_head != head:
            work = self._bookings[new_head].work if new_head is not None else None
            self._table.head_us[slot] = work.prefill_us if work is not None else 0
            self._table.head_started_s[slot] = now_s

    def check(self) -> None:
        """Raise `AssertionError` unless the columns are the sums of the bookings."""
        table = self._table
        sums: dict[str, dict[int, int]] = {
            name: {}
            for name in (
                "booked_prefills",
                "booked_prefill_tokens",
                "booked_prefill_us",
                "booked_sends",
                "booked_decodes",
                "booked_blocks",
            )
        }

        def add(name: str, slot: int, amount: int) -> None:
            sums[name][slot] = sums[name].get(slot, 0) + amount

        at: dict[int, set[int]] = {}
        for number, booking in self._bookings.items():
            work, source, target = booking.work, booking.prefill_slot, booking.decode_slot
            assert source is not None or target is not None, f"booking {number} has no share"
            for slot in {source, target} - {None}:
                assert slot is not None and table.is_live[slot], f"booking {number} at a gone node"
                at.setdefault(slot, set()).add(number)
            if source is not None and booking.state is BookingState.PREFILLING:
                add("booked_prefills", source, 1)
                add("booked_prefill_tokens", source, work.prefill_tokens)
                add("booked_prefill_us", source, work.prefill_us)
            if source is not None and not booking.stays:
                add("booked_blocks", source, work.prompt_blocks)
            if booking.state is BookingState.SENDING and source is not None:
                add("booked_sends", source, 1)
            if target is not None:
                add("booked_decodes", target, 1)
                add("booked_blocks", target, work.total_blocks)
        for name, by_slot in sums.items():
            column = getattr(table, name)
            for slot in range(table.num_slots):
                have, want = int(column[slot]), by_slot.get(slot, 0)
                assert have == want, f"{name} of {table.names[slot]}: {have}, bookings say {want}"
        assert at == {slot: set(held) for slot, held in self._at.items() if held}
        for slot, queue in self._prefilling.items():
            head = next(iter(queue), None)
            want = self._bookings[head].work.prefill_us if head is not None else 0
            assert int(table.head_us[slot]) == want
            assert len(queue) == int(table.booked_prefills[slot])
