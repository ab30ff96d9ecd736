"""Bounds on what waits, and when to come back."""

from __future__ import annotations

import pytest

from flowkv_jax.cluster.waiting_room import WaitingRoom
from flowkv_jax.errors import QueueOverflowError, RetryableRequestError


def retry_after_s(room: WaitingRoom, num_tokens: int = 1) -> float | None:
    with pytest.raises(RetryableRequestError) as refusal:
        room.require_room(num_tokens)
    return refusal.value.retry_after_s


def test_come_back_when_one_has_left_at_the_pace_of_late() -> None:
    room = WaitingRoom(4, None)
    for _ in range(4):
        room.enter(1)
    assert retry_after_s(room) == 1.0  # nobody has left yet
    for now_s in (0.0, 0.5, 1.0):
        room.leave(1, now_s)
        room.enter(1)
    assert retry_after_s(room) == 0.5


def test_for_tokens_as_many_have_to_leave_as_make_the_room() -> None:
    room = WaitingRoom(100, 100)
    for _ in range(10):
        room.enter(10)
    for now_s in (0.0, 0.5):
        room.leave(10, now_s)
        room.enter(10)
    assert retry_after_s(room, num_tokens=30) == pytest.approx(3 * 0.5)


def test_waits_are_bounded_and_idle_times_do_not_count() -> None:
    room = WaitingRoom(1, None)
    room.enter(1)
    room.leave(1, 0.0)
    room.enter(1)
    room.leave(1, 1000.0)
    room.enter(1)
    assert retry_after_s(room) == 1.0
    slow = WaitingRoom(2, None)
    slow.enter(1)
    slow.enter(1)
    for now_s in (0.0, 1000.0):
        slow.leave(1, now_s)
        slow.enter(1)
    with pytest.raises(QueueOverflowError):
        slow.require_room(1)
    assert retry_after_s(slow) == 30.0


@pytest.mark.parametrize("bounds", [(0, None), (1, 0)])
def test_a_bound_must_let_somebody_in(bounds: tuple[int, int | None]) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        WaitingRoom(*bounds)
