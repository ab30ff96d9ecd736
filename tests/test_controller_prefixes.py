"""The prefix directory against a table of sets, its bound, and the log of decisions."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowkv_jax.controller.decision_log import Candidate, DecisionKind, DecisionLog
from flowkv_jax.controller.prefix_directory import PrefixDirectory


def chain(name: str, length: int) -> tuple[bytes, ...]:
    return tuple(f"{name}{index}".encode() for index in range(length))


def longest(held: set[bytes], hashes: tuple[bytes, ...]) -> int:
    for length, digest in enumerate(hashes):
        if digest not in held:
            return length
    return len(hashes)


class TestDirectory:
    def test_longest_prefix_of_each_node(self) -> None:
        directory = PrefixDirectory(100)
        for slot in range(4):
            directory.join(slot)
        a = chain("a", 4)
        directory.add(0, a[:3])
        directory.add(1, (a[0], a[2], a[3]))  # a gap: what follows cannot be used
        directory.add(2, chain("b", 4))
        assert directory.match(a) == {0: 3, 1: 1}
        assert directory.match(chain("b", 9)) == {2: 4}
        assert directory.match(()) == {} and directory.match(chain("c", 1)) == {}
        assert [directory.count(slot) for slot in range(4)] == [3, 3, 4, 0]

    def test_node_leaves(self) -> None:
        directory = PrefixDirectory(100)
        directory.join(0)
        directory.add(0, chain("a", 3))
        directory.leave(0)
        directory.leave(0)
        assert directory.match(chain("a", 3)) == {}
        directory.join(0)
        assert directory.match(chain("a", 3)) == {} and directory.count(0) == 0

    def test_bounded(self) -> None:
        directory = PrefixDirectory(10)
        directory.join(0)
        for index in range(100):
            directory.add(0, chain(f"{index}-", 3))
            directory.check()
        assert len(directory) == 10

    def test_what_is_used_stays_and_chains_are_cut_at_their_ends(self) -> None:
        directory = PrefixDirectory(6)
        directory.join(0)
        kept = chain("kept", 4)
        directory.add(0, kept)
        for index in range(20):
            assert directory.match(kept)[0] == 4
            directory.add(0, chain(f"{index}-", 2))
        directory.add(0, chain("x", 2))
        assert directory.match(kept) == {0: 2}

    def test_many_lives_do_not_widen_it(self) -> None:
        directory = PrefixDirectory(1000)
        directory.join(1)
        directory.add(1, chain("b", 1))
        for index in range(1000):
            directory.join(0)
            directory.add(0, chain(f"{index}-", 1))
            directory.leave(0)
        directory.check()
        assert max(mask.bit_length() for mask in directory._holders.values()) < 100
        assert directory.match(chain("b", 1)) == {1: 1}

    def test_bound_must_be_positive(self) -> None:
        with pytest.raises(ValueError, match="max_entries=0"):
            PrefixDirectory(0)

    @settings(max_examples=60, deadline=None)
    @given(st.data())
    def test_against_sets(self, data: st.DataObject) -> None:
        directory, held = PrefixDirectory(10_000), dict[int, set[bytes]]()
        chains = [chain(name, 6) for name in "abc"]
        for _ in range(data.draw(st.integers(1, 30))):
            slot = data.draw(st.integers(0, 3))
            action = data.draw(st.sampled_from(["join", "leave", "add", "remove", "clear"]))
            some = data.draw(st.sampled_from(chains))
            start, stop = sorted(data.draw(st.tuples(st.integers(0, 6), st.integers(0, 6))))
            if action == "join":
                directory.join(slot)
                held.setdefault(slot, set())
            elif action == "leave":
                directory.leave(slot)
                held.pop(slot, None)
            elif slot in held and action == "add":
                directory.add(slot, some[start:stop])
                held[slot] |= set(some[start:stop])
            elif slot in held and action == "remove":
                directory.remove(slot, some[start:stop])
                held[slot] -= set(some[start:stop])
            elif slot in held:
                directory.clear(slot)
                held[slot] = set()
            directory.check()
            for hashes in chains:
                want = {s: longest(have, hashes) for s, have in held.items()}
                assert directory.match(hashes) == {s: n for s, n in want.items() if n}
            assert {s: directory.count(s) for s in held} == {s: len(h) for s, h in held.items()}


class TestLog:
    def test_bounded_and_numbered(self) -> None:
        log = DecisionLog(3)
        for index in range(5):
            log.add(float(index), DecisionKind.ROUTE, f"s{index}", "a", "because")
        assert [d.number for d in log.newest(10)] == [3, 4, 5]
        assert [d.number for d in log.newest(2)] == [4, 5]
        assert log.newest(0) == []

    def test_following(self) -> None:
        log = DecisionLog(10)
        for index in range(5):
            log.add(float(index), DecisionKind.NODE, f"s{index}", "a", "because")
        assert [d.number for d in log.newest(2, after=1)] == [2, 3]
        assert log.newest(2, after=5) == []

    def test_as_plain_values(self) -> None:
        log = DecisionLog(10)
        candidate = Candidate("a", "prefill", 0.5, {"queue_s": 0.5})
        entry = log.add(1.0, DecisionKind.ROUTE, "s", "a -> b", "why", [candidate], {"x": 1.0})
        assert entry.to_dict() == {
            "number": 1,
            "time_s": 1.0,
            "kind": "route",
            "subject": "s",
            "chosen": "a -> b",
            "reason": "why",
            "candidates": [
                {"name": "a", "purpose": "prefill", "cost_s": 0.5, "terms": {"queue_s": 0.5}}
            ],
            "terms": {"x": 1.0},
        }

    def test_bad_limit(self) -> None:
        with pytest.raises(ValueError, match="limit=-1"):
            DecisionLog(1).newest(-1)
