"""Load of nodes: the eight metrics, the score, the window, levels with hysteresis, settings."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowkv_jax.controller.config import ControllerConfig
from flowkv_jax.controller.load_level import Level, LoadLevel
from flowkv_jax.controller.load_score import (
    METRICS,
    load_score,
    normalised_metrics,
    queue_pressure,
    with_booked_decodes,
)
from flowkv_jax.controller.load_window import LoadWindow, RateWindow
from flowkv_jax.errors import ConfigError
from tests.controller_cluster import node_info, node_load, node_report

INFO = node_info("a", max_num_seqs=8)


def metrics_of(**load: float) -> dict[str, float | None]:
    device = {
        key: load.pop(key)
        for key in ("device_utilisation", "memory_bandwidth_utilisation")
        if key in load
    }
    report = node_report(node_load(**load), **device)
    return dict(zip(METRICS, normalised_metrics(INFO, report), strict=True))


class TestMetrics:
    def test_idle(self) -> None:
        assert metrics_of() == dict.fromkeys(METRICS[:6], 0.0) | dict.fromkeys(METRICS[6:])

    @pytest.mark.parametrize(
        ("reported", "metric", "value"),
        [
            ({"num_requests_running": 4}, "running", 0.5),
            ({"num_requests_running": 99}, "running", 1.0),
            ({"num_requests_waiting": 8}, "waiting", 0.5),
            ({"num_requests_receiving": 8}, "waiting", 0.5),
            ({"num_requests_waiting": 24}, "waiting", 0.75),
            ({"num_requests_swapped": 8}, "swapped", 0.5),
            ({"num_requests_sending": 8}, "sending", 0.5),
            ({"token_budget_used": 0.3}, "token_budget", 0.3),
            ({"token_budget_used": 1.3}, "token_budget", 1.0),
            ({"kv_cache_usage": 0.6}, "kv_use", 0.6),
            ({"device_utilisation": 0.9}, "device_use", 0.9),
            ({"memory_bandwidth_utilisation": -0.1}, "memory_bandwidth", 0.0),
        ],
    )
    def test_each_alone(self, reported: dict[str, float], metric: str, value: float) -> None:
        found = metrics_of(**reported)
        assert found[metric] == pytest.approx(value)
        assert all(not v for name, v in found.items() if name != metric)

    @pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, -1e30])
    def test_nonsense_is_no_load_or_all_of_it(self, number: float) -> None:
        found = metrics_of(
            kv_cache_usage=number,
            token_budget_used=number,
            device_utilisation=number,
            num_requests_waiting=-5,
        )
        assert all(value is None or 0 <= value <= 1 for value in found.values())
        assert found["waiting"] == 0.0


shares = st.floats(0, 1)
weights = st.lists(st.floats(0, 1), min_size=8, max_size=8).filter(lambda w: sum(w) > 0.1)


class TestScore:
    @pytest.mark.parametrize("index", range(8))
    def test_each_weight_alone(self, index: int) -> None:
        metrics = tuple(0.7 if k == index else 0.1 for k in range(8))
        one = [float(k == index) for k in range(8)]
        assert load_score(metrics, one) == pytest.approx(0.7)

    @given(st.lists(shares, min_size=8, max_size=8), weights)
    def test_in_bounds(self, metrics: list[float], some: list[float]) -> None:
        total = sum(some)
        assert 0 <= load_score(tuple(metrics), [w / total for w in some]) <= 1

    @given(st.lists(shares, min_size=8, max_size=8), weights, st.integers(0, 7), shares)
    def test_monotone(
        self, metrics: list[float], some: list[float], index: int, more: float
    ) -> None:
        higher = list(metrics)
        higher[index] = max(higher[index], more)
        total = sum(some)
        scaled = [w / total for w in some]
        assert load_score(tuple(higher), scaled) >= load_score(tuple(metrics), scaled) - 1e-12

    def test_what_is_not_measured_is_left_out(self) -> None:
        some = ControllerConfig().decode_load_weights
        metrics = (1.0,) * 6 + (None, None)
        assert load_score(metrics, some) == pytest.approx(1.0)
        assert load_score((None,) * 8, some) == 0.0

    def test_booked_sequences_count_before_they_are_reported(self) -> None:
        assert with_booked_decodes((), 4, 8) == (0.5, 0.0, *[None] * 6)
        assert with_booked_decodes((0.9, 0.2, *[0.1] * 6), 4, 8) == (0.9, 0.2, *[0.1] * 6)
        assert with_booked_decodes((0.1, 0.2, *[0.1] * 6), 16, 8) == (1.0, 0.5, *[0.1] * 6)

    def test_queue_pressure(self) -> None:
        assert queue_pressure(0.0, 2.0) == 0.0
        assert queue_pressure(2.0, 2.0) == 0.5
        assert queue_pressure(100.0, 2.0) > 0.98


class TestWindow:
    def test_empty(self) -> None:
        assert LoadWindow(5.0).average(1.0) == ()

    def test_one_report(self) -> None:
        window = LoadWindow(5.0)
        window.add((0.25, None), 1.0)
        assert window.average(1.0) == (0.25, None)
        assert window.average(1000.0) == (0.25, None)

    def test_each_report_counts_as_long_as_it_was_the_newest(self) -> None:
        window = LoadWindow(10.0)
        window.add((0.0,), 0.0)
        window.add((1.0,), 6.0)
        assert window.average(8.0)[0] == pytest.approx(2 / 8)
        # The window begins at 2: 4 s of the first, 6 s of the second.
        assert window.average(12.0)[0] == pytest.approx(6 / 10)
        assert window.average(20.0)[0] == pytest.approx(1.0)

    def test_the_newest_counts_at_once(self) -> None:
        window = LoadWindow(10.0)
        window.add((0.0,), 0.0)
        window.add((1.0,), 7.0)
        assert window.average(7.0)[0] == pytest.approx(1 / 8)

    def test_measured_only_at_times(self) -> None:
        window = LoadWindow(10.0)
        window.add((None,), 0.0)
        window.add((0.4,), 2.0)
        window.add((None,), 4.0)
        assert window.average(6.0)[0] == pytest.approx(0.4)

    def test_time_that_stands_still_or_runs_backwards(self) -> None:
        window = LoadWindow(10.0)
        window.add((0.2,), 5.0)
        window.add((0.4,), 5.0)
        window.add((0.6,), 4.0)
        (average,) = window.average(5.0)
        assert average is not None and 0.2 <= average <= 0.6

    @given(
        st.lists(st.tuples(st.floats(0, 3), shares), min_size=1, max_size=30), st.floats(0.1, 20)
    )
    def test_never_outside_what_was_reported(
        self, reports: list[tuple[float, float]], window_s: float
    ) -> None:
        window, now_s = LoadWindow(window_s), 0.0
        for wait_s, value in reports:
            now_s += wait_s
            window.add((value,), now_s)
        (average,) = window.average(now_s)
        values = [value for _, value in reports]
        assert average is not None
        assert min(values) - 1e-9 <= average <= max(values) + 1e-9


class TestRate:
    def test_over_the_window(self) -> None:
        rate = RateWindow(30.0)
        assert rate.per_s(5.0) == 0.0
        for second in range(60):
            rate.add(2.0, float(second))
        assert rate.per_s(59.0) == pytest.approx(2.0)
        assert rate.per_s(74.5) == pytest.approx(1.0, abs=0.1)
        assert rate.per_s(1000.0) == 0.0

    def test_before_the_window_is_full(self) -> None:
        rate = RateWindow(30.0)
        rate.add(3.0, 10.0)
        assert rate.per_s(10.0) == 3.0
        assert rate.per_s(13.0) == 1.0


class TestLevel:
    def follow(self, *loads: float, hold_s: float = 0.0) -> list[Level]:
        level = LoadLevel(0.2, 0.6, hold_s)
        return [level.update(load, float(second)) for second, load in enumerate(loads)]

    def test_hysteresis(self) -> None:
        low, middle, high = Level.LOW, Level.MIDDLE, Level.HIGH
        assert self.follow(0.1, 0.3, 0.41, 0.59, 0.6, 0.45, 0.39, 0.3, 0.21, 0.2, 0.35) == [
            low, low, middle, middle, high, high, middle, middle, middle, low, low,
        ]  # fmt: skip
        assert self.follow(0.9, 0.1) == [high, low]

    def test_must_hold(self) -> None:
        low, high = Level.LOW, Level.HIGH
        assert self.follow(0.1, 0.9, 0.9, 0.1, 0.9, 0.9, 0.9, 0.9, hold_s=3) == [low] * 7 + [high]

    def test_noise_around_a_threshold_changes_nothing_twice(self) -> None:
        levels = self.follow(*[0.58, 0.62] * 20)
        assert sum(a is not b for a, b in zip(levels, levels[1:], strict=False)) == 1

    def test_held(self) -> None:
        level = LoadLevel(0.2, 0.6, 0.0)
        assert level.held_s(Level.LOW, 1.0) == 0.0
        level.update(0.9, 1.0)
        level.update(0.9, 3.0)
        assert level.held_s(Level.HIGH, 4.0) == 3.0
        assert level.held_s(Level.LOW, 4.0) == 0.0


class TestSettings:
    def test_published_weights(self) -> None:
        config = ControllerConfig()
        for some in (config.prefill_load_weights, config.decode_load_weights):
            assert len(some) == len(METRICS) and min(some) >= 0 and sum(some) == pytest.approx(1)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"prefill_load_weights": (0.5, 0.5)}, "prefill_load_weights=.* must have 8 entries"),
            ({"decode_load_weights": (0.2,) * 8}, "sum 1, not 1.6"),
            ({"decode_load_weights": (-1.0, 2.0, *[0.0] * 6)}, "0 or more"),
            ({"decode_load_weights": (math.nan,) * 8}, "0 or more"),
            ({"role_load_low": 0.7}, "role_load_low=0.7 and role_load_high=0.6"),
            ({"load_window_s": 0.0}, "load_window_s=0.0 must be positive"),
            ({"role_load_hold_s": -1.0}, "role_load_hold_s=-1.0 must be finite and not negative"),
            ({"local_prefill_max_tokens": -1}, "local_prefill_max_tokens=-1"),
            ({"min_decode_nodes": 9}, "min_decode_nodes=9 must be at most max_decode_nodes=8"),
        ],
    )
    def test_refused(self, changes: dict[str, object], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            ControllerConfig(**changes)  # type: ignore[arg-type]
