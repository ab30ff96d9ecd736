"""Predicted times: prefill rates that shrug off cold starts, hand-offs fitted to what was seen."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowkv_jax.controller.config import ControllerConfig
from flowkv_jax.controller.cost_model import PrefillRates, TransferTimes, prefill_seconds

CONFIG = ControllerConfig(
    default_transfer_latency_s=0.005,
    default_transfer_bytes_per_s=1e9,
    default_cross_host_bytes_per_s=1e8,
)


class TestPrefill:
    def test_formula(self) -> None:
        # 100 tokens over 50 cached ones: a mean context of 100, as costly again at 100.
        assert float(prefill_seconds(100, 50, 1000.0, 100)) == pytest.approx(0.2)
        assert float(prefill_seconds(0, 50, 1000.0, 100)) == 0.0

    @given(st.integers(1, 4000), st.integers(0, 4000))
    def test_a_cached_token_never_costs_more(self, uncached: int, cached: int) -> None:
        longer = float(prefill_seconds(uncached + 1, cached, 1000.0, 4096))
        assert float(prefill_seconds(uncached, cached + 1, 1000.0, 4096)) <= longer


class TestPrefillRates:
    def test_prior(self) -> None:
        rates = PrefillRates(2000.0)
        assert rates.join("a", 1.0) == 2000.0
        assert rates.join("fast", 3.0) == 6000.0

    def test_cold_samples_do_not_count(self) -> None:
        rates = PrefillRates(2000.0)
        rates.join("a", 1.0)
        assert rates.observe("a", 3.0) == 2000.0  # the first prompt waited for compilation
        assert rates.observe("a", 5.0) == 2000.0
        for _ in range(6):
            found = rates.observe("a", 8000.0)
        assert found == 8000.0

    def test_a_slow_node_is_learned(self) -> None:
        rates = PrefillRates(2000.0)
        rates.join("a", 1.0)
        for _ in range(4):
            found = rates.observe("a", 100.0)
        assert found == 100.0

    def test_a_new_node_is_taken_for_what_the_others_are(self) -> None:
        rates = PrefillRates(2000.0)
        rates.join("a", 2.0)
        for _ in range(8):
            rates.observe("a", 500.0)
        assert rates.join("b", 1.0) == 250.0

    def test_leaves_and_comes_back(self) -> None:
        rates = PrefillRates(2000.0)
        rates.join("a", 1.0)
        for _ in range(8):
            rates.observe("a", 100.0)
        rates.leave("a")
        rates.leave("a")
        assert rates.join("a", 1.0) == 2000.0


def predict(times: TransferTimes, data_bytes: float, src: int = 0, slots: int = 3) -> list[float]:
    hosts = np.array([0, 0, 1][:slots], np.int64)
    return times.predict(src, hosts, np.full(slots, data_bytes)).tolist()


class TestTransferTimes:
    def test_defaults(self) -> None:
        assert predict(TransferTimes(CONFIG), 1e6) == pytest.approx([0.0, 0.006, 0.015])

    def test_learns_latency_and_bandwidth(self) -> None:
        times = TransferTimes(CONFIG)
        for data_bytes in (1 << 20, 8 << 20, 32 << 20, 128 << 20) * 8:
            times.observe(0, 1, True, data_bytes, 0.002 + data_bytes / 5e9)
        for data_bytes in (4 << 20, 64 << 20):
            want = 0.002 + data_bytes / 5e9
            assert predict(times, data_bytes)[1] == pytest.approx(want, rel=0.15)
        assert predict(times, 1e6)[2] == pytest.approx(0.015)

    def test_one_size_says_what_that_size_takes(self) -> None:
        times = TransferTimes(CONFIG)
        for _ in range(20):
            times.observe(0, 1, True, 32 << 20, 0.5)
        assert predict(times, 32 << 20)[1] == pytest.approx(0.5, rel=0.1)
        assert predict(times, 0.0)[1] >= 0.0

    def test_forgets(self) -> None:
        times = TransferTimes(CONFIG)
        for seconds in [2.0] * 10 + [0.05] * 60:
            times.observe(0, 1, True, 32 << 20, seconds)
        assert predict(times, 32 << 20)[1] < 0.08

    def test_nonsense_and_nothing_teach_nothing(self) -> None:
        times = TransferTimes(CONFIG)
        before = predict(times, 1e6)
        for data_bytes, seconds in ((0, 1.0), (10, 0.0), (10, float("nan")), (10, float("inf"))):
            times.observe(0, 1, True, data_bytes, seconds)
        assert predict(times, 1e6) == before

    def test_a_slot_that_becomes_another_nodes(self) -> None:
        times = TransferTimes(CONFIG)
        before = predict(times, 1e6)
        times.observe(0, 1, True, 32 << 20, 2.0)
        times.observe(1, 0, True, 32 << 20, 2.0)
        assert predict(times, 1e6) != before
        times.leave(1)
        assert predict(times, 1e6) == before
        assert predict(times, 1e6, src=1)[0] == pytest.approx(before[1])

    def test_more_nodes_than_when_it_was_measured(self) -> None:
        times = TransferTimes(CONFIG)
        times.observe(0, 1, True, 32 << 20, 2.0)
        hosts = np.zeros(100, np.int64)
        found = times.predict(0, hosts, np.full(100, 1e6))
        assert found.shape == (100,) and found[99] == pytest.approx(0.006) and found[1] > 0.006

    @given(
        st.lists(
            st.tuples(st.integers(1, 1 << 32), st.floats(1e-6, 100.0)), min_size=1, max_size=30
        ),
        st.integers(0, 1 << 34),
    )
    def test_never_negative(self, seen: list[tuple[int, float]], data_bytes: int) -> None:
        times = TransferTimes(CONFIG)
        for size, seconds in seen:
            times.observe(0, 1, True, size, seconds)
        assert all(0 <= seconds < float("inf") for seconds in predict(times, float(data_bytes)))
