"""Changes one at a time, and calls between them."""

from __future__ import annotations

import pytest

from flowkv_jax.cluster.turns import Turns


def test_calls_come_after_the_change_and_in_order() -> None:
    turns, seen = Turns(), []

    def change(value: int) -> int:
        turns.call(seen.append, "first")
        turns.call(seen.append, "second")
        seen.append("changed")
        return value

    assert turns.take(change, 3) == 3
    assert seen == ["changed", "first", "second"]


def test_a_call_may_change_again_and_its_calls_queue_up() -> None:
    turns, seen = Turns(), []
    turns.take(
        lambda: (
            turns.call(turns.take, lambda: turns.call(seen.append, "of the second")),
            turns.call(seen.append, "of the first"),
        )
    )
    assert seen == ["of the first", "of the second"]


def test_a_change_within_a_change_is_refused_and_may_be_posted() -> None:
    turns, seen = Turns(), []

    def change() -> None:
        turns.post(seen.append, "posted")
        with pytest.raises(RuntimeError, match="in the middle of another change"):
            turns.take(seen.append, "taken")
        turns.call(seen.append, "called")

    turns.take(change)
    assert seen == ["called", "posted"]


def test_an_error_of_a_call_is_logged_and_the_next_is_made(
    caplog: pytest.LogCaptureFixture,
) -> None:
    turns, seen = Turns(), []
    turns.take(lambda: (turns.call(int, "no number"), turns.call(seen.append, "made")))
    assert seen == ["made"]
    assert "invalid literal" in caplog.text


def test_an_error_of_a_change_goes_to_whoever_asked_and_posted_ones_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    turns, seen = Turns(), []
    with pytest.raises(ValueError):
        turns.take(int, "no number")
    turns.post(int, "nor this")
    turns.post(seen.append, "made")
    assert seen == ["made"]
    assert "nor this" in caplog.text
