"""Who is chosen: roles, room, prefixes, load, transfers, and what happens when nobody is left."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowkv_jax.controller.config import ControllerConfig
from flowkv_jax.controller.controller import Controller
from flowkv_jax.controller.role import Role
from flowkv_jax.controller.routing import NoNodeAvailable, Placement
from flowkv_jax.controller.snapshot import Regime
from tests.controller_cluster import handoff, node_info, node_load, node_report, query

P, D, H = Role.PREFILL, Role.DECODE, Role.HYBRID


def cluster(*, config: ControllerConfig | None = None, **roles: Role) -> Controller:
    controller = Controller(config)
    for name, role in roles.items():
        controller.join(node_info(name, role), 0.0)
    return controller


def nodes(placement: Placement) -> tuple[str, str]:
    return placement.prefill_node, placement.decode_node


def hashes(name: str, blocks: int) -> tuple[bytes, ...]:
    return tuple(f"{name}{index}".encode() for index in range(blocks))


class TestRoles:
    def test_each_does_its_own(self) -> None:
        controller = cluster(p=P, d=D)
        assert nodes(controller.place(query(), 0.0)) == ("p", "d")

    def test_hybrid_keeps_what_it_prefilled(self) -> None:
        assert nodes(cluster(a=H, b=H).place(query(), 0.0)) == ("a", "a")

    def test_one_node(self) -> None:
        for role in Role:
            controller = cluster(only=role)
            assert nodes(controller.place(query(), 0.0)) == ("only", "only")
            assert controller.decisions(1)[0].reason == "the only node"

    def test_goes_on_without_prefill_nodes(self) -> None:
        controller = cluster(p=P, d=D)
        controller.leave("p", 1.0, "lost")
        assert nodes(controller.place(query(), 1.0)) == ("d", "d")

    def test_goes_on_without_decode_nodes(self) -> None:
        controller = cluster(p0=P, p1=P, d=D)
        controller.leave("d", 1.0, "lost")
        placement = controller.place(query(), 1.0)
        assert placement.prefill_node == placement.decode_node
        assert "no decode node left" in controller.decisions(1)[0].reason

    def test_nobody(self) -> None:
        with pytest.raises(NoNodeAvailable, match="no node can serve 's'"):
            Controller().place(query(), 0.0)
        with pytest.raises(NoNodeAvailable, match="1 are excluded"):
            cluster(a=H).place(query(exclude=frozenset({"a"})), 0.0)

    def test_too_long_for_every_pool(self) -> None:
        controller = cluster(a=H, b=H)
        assert controller.place(query(num_tokens=15_999), 0.0)
        with pytest.raises(NoNodeAvailable, match="too small a pool"):
            controller.place(query(num_tokens=16_000), 0.0)

    def test_larger_pool_is_found(self) -> None:
        controller = cluster(a=H, b=H)
        controller.join(node_info("large", H, num_blocks=4000), 0.0)
        assert nodes(controller.place(query(num_tokens=20_000), 0.0)) == ("large", "large")

    def test_draining_nodes_get_nothing(self) -> None:
        controller = cluster(p=P, d=D, x=D)
        controller.place(query(), 0.0)
        controller.request_drain("d", 0.0)
        for index in range(9):
            placement = controller.place(query(f"{index}"), 0.0)
            assert "d" not in nodes(placement)

    def test_switching_node_helps_only_where_nobody_else_is_left(self) -> None:
        controller = cluster(p=P, d=D, x=D)
        first = controller.place(query(), 0.0)
        assert nodes(first) == ("p", "d")
        controller.request_role("d", P, 0.0)
        assert nodes(controller.place(query(), 0.0)) == ("p", "x")
        controller.leave("x", 0.0, "lost")
        assert nodes(controller.place(query(exclude=frozenset({"p"})), 0.0)) == ("d", "d")


class TestLoad:
    def test_a_burst_spreads_evenly_at_once(self) -> None:
        controller = cluster(a=P, b=P, c=P, x=D, y=D)
        placements = [controller.place(query(f"{i}"), 0.0) for i in range(12)]
        assert Counter(p.prefill_node for p in placements) == {"a": 4, "b": 4, "c": 4}
        assert Counter(p.decode_node for p in placements) == {"x": 6, "y": 6}

    def test_work_is_counted_once(self) -> None:
        controller = cluster(a=P, b=P, d=D)
        bookings = [controller.place(query(f"{i}", 2000), 0.0).booking for i in range(2)]
        before = {n.name: n.queue_s for n in controller.snapshot(0.0).nodes}
        # The nodes report the same work: nothing is added.
        for name in ("a", "b"):
            waiting = node_load(num_requests_waiting=1, num_waiting_tokens=2000)
            controller.report(name, 1, node_report(waiting), 0.0)
        assert {n.name: n.queue_s for n in controller.snapshot(0.0).nodes} == before
        # Work nobody here has booked is.
        waiting = node_load(num_requests_waiting=2, num_waiting_tokens=4000)
        controller.report("a", 1, node_report(waiting), 0.0)
        assert nodes(controller.place(query("x", 2000), 0.0))[0] == "b"
        for booking in bookings:
            controller.ended(booking, 0.0)
        controller.check()

    def test_what_is_being_computed_is_no_queue(self) -> None:
        controller = cluster(a=P, b=P, d=D)
        controller.place(query("long", 4000), 0.0)
        queue_s = [controller.snapshot(now_s).nodes[0].queue_s for now_s in (0.0, 1.0, 99.0)]
        assert queue_s[0] > 2.0
        assert queue_s[1] == pytest.approx(queue_s[0] - 1.0, abs=1e-3)
        assert queue_s[2] == pytest.approx(0.0, abs=1e-5)

    def test_the_faster_node_takes_more(self) -> None:
        controller = cluster(d=D, slow=P)
        controller.join(node_info("zfast", P, relative_speed=3.0), 0.0)
        chosen = Counter(controller.place(query(f"{i}"), 0.0).prefill_node for i in range(40))
        assert chosen["zfast"] == pytest.approx(30, abs=1)

    def test_decode_goes_where_there_is_room(self) -> None:
        controller = cluster(p=P, full=D, zfree=D)
        waiting = node_load(kv_cache_usage=0.999, num_requests_running=7)
        controller.report("full", 1, node_report(waiting), 0.0)
        chosen = Counter(controller.place(query(f"{i}"), 0.0).decode_node for i in range(20))
        assert chosen == {"zfree": 20}

    def test_decode_nearby_if_load_is_equal(self) -> None:
        controller = cluster(p=P)
        controller.join(node_info("afar", D, host="two"), 0.0)
        controller.join(node_info("near", D), 0.0)
        assert controller.place(query(num_tokens=4000), 0.0).decode_node == "near"

    def test_learned_transfer_times_decide(self) -> None:
        controller = cluster(p=P, d=D, e=D)
        for _ in range(5):
            controller.moved(0, handoff("p", "d", 100 << 20, 2.0), 0.0)
        assert controller.place(query(num_tokens=1600), 0.0).decode_node == "e"

    def test_a_wait_for_room_while_the_prompt_was_computed_is_no_part_of_them(self) -> None:
        controller = cluster(p=P, d=D, e=D)
        moved = dataclasses.replace(handoff("p", "d", 100 << 20, 2.0), deferred_s=3.0)
        for _ in range(5):
            controller.moved(0, dataclasses.replace(moved, transfer_s=2.0), 0.0)
        assert controller.place(query(num_tokens=1600), 0.0).decode_node == "e"

    def test_block_bytes_are_learned(self) -> None:
        controller = Controller()
        for name, role in (("p", P), ("d", D)):
            controller.join(node_info(name, role, block_bytes=0), 0.0)
        controller.moved(0, handoff("p", "d", 100 << 20, 0.1, blocks=10), 0.0)
        controller.place(query(num_tokens=160 * 64), 0.0)
        (decode,) = [c for c in controller.decisions(1)[0].candidates if c.purpose == "decode"]
        assert decode.terms["transfer_s"] > 1.0
        controller.join(node_info("q", P, block_bytes=0), 0.0)
        controller.moved(0, handoff("q", "d", 1 << 90, 1.0), 0.0)
        assert controller.place(query(exclude=frozenset({"p"})), 0.0)

    def test_while_roles_are_imbalanced_measured_load_counts_too(self) -> None:
        config = ControllerConfig(enable_role_switch=False, role_load_hold_s=0.0)
        controller = cluster(config=config, a=P, b=P, d=D)
        overloaded = {"num_requests_waiting": 90, "token_budget_used": 1.0, "kv_cache_usage": 1.0}
        for name, changes in (("a", {"num_requests_sending": 90}), ("b", {}), ("d", {})):
            load = node_load(**(overloaded | changes if name != "d" else {}))
            controller.report(name, 1, node_report(load), 0.0)
        placement = controller.place(query(), 0.0)
        assert placement.prefill_node == "a"
        controller.ended(placement.booking, 0.0)
        controller.tick(1.0)
        assert controller.snapshot(1.0).regime is Regime.IMBALANCED
        assert controller.place(query(), 1.0).prefill_node == "b"
        assert "roles imbalanced" in controller.decisions(1)[0].reason


class TestPrefixes:
    def with_prefix(self, name: str = "b", blocks: int = 100) -> Controller:
        controller = cluster(a=P, b=P, c=P, d=D)
        added = node_report(added_blocks=hashes("x", blocks))
        controller.report(name, 1, added, 0.0)
        return controller

    def ask(self, controller: Controller, blocks: int = 100) -> Placement:
        asked = query("s", 16 * blocks + 4, block_hashes=hashes("x", blocks))
        return controller.place(asked, 0.0)

    def test_wins_when_idle(self) -> None:
        controller = self.with_prefix()
        assert self.ask(controller).prefill_node == "b"
        terms = controller.decisions(1)[0].candidates[0].terms
        assert terms["cached_tokens"] == 1600.0

    def test_yields_under_load(self) -> None:
        controller = self.with_prefix()
        for index in range(30):
            controller.place(query(f"{index}", 200, exclude=frozenset({"a", "c"})), 0.0)
        assert self.ask(controller).prefill_node != "b"

    def test_is_weighed_per_request_however_uneven_the_load(self) -> None:
        # Others are far busier: no gate turns affinity off.
        controller = self.with_prefix()
        for index in range(40):
            controller.place(query(f"{index}", 2000, exclude=frozenset({"b"})), 0.0)
        controller.place(query("own", 1000, exclude=frozenset({"a", "c"})), 0.0)
        assert self.ask(controller).prefill_node == "b"

    def test_an_empty_cache_draws_nothing(self) -> None:
        controller = cluster(a=P, d=D)
        controller.report("a", 1, node_report(added_blocks=hashes("x", 50)), 0.0)
        controller.join(node_info("b", P), 0.0)
        chosen = Counter(controller.place(query(f"{i}", 320), 0.0).prefill_node for i in range(20))
        assert chosen == {"a": 10, "b": 10}

    def test_of_a_node_that_left_is_forgotten(self) -> None:
        controller = self.with_prefix()
        controller.leave("b", 0.0, "lost")
        controller.join(node_info("b", P), 0.0)
        assert self.ask(controller).prefill_node == "a"

    def test_evicted_and_cleared_blocks(self) -> None:
        controller = self.with_prefix()
        controller.report("b", 1, node_report(removed_blocks=hashes("x", 1)), 0.0)
        assert self.ask(controller).prefill_node == "a"
        controller = self.with_prefix()
        controller.report(
            "b", 1, node_report(prefixes_cleared=True, added_blocks=hashes("y", 2)), 0.0
        )
        assert controller.snapshot(0.0).nodes[1].cached_prefix_blocks == 2

    def test_blocks_at_the_decode_node_are_not_sent(self) -> None:
        controller = cluster(p=P, d=D, e=D)
        controller.report("e", 1, node_report(added_blocks=hashes("x", 100)), 0.0)
        assert self.ask(controller).decode_node == "e"
        (best, _) = [c for c in controller.decisions(1)[0].candidates if c.purpose == "decode"]
        assert best.terms["reused_tokens"] == 1600.0


class TestComputedPrompts:
    def test_only_a_decode_node_is_wanted(self) -> None:
        controller = cluster(p=P, d=D, e=D)
        asked = query(prefill_node="p", exclude=frozenset({"d"}))
        placement = controller.place(asked, 0.0)
        assert nodes(placement) == ("p", "e")
        view = controller.snapshot(0.0).nodes[-1]
        assert view.name == "p" and view.booked_prefills == 0 and view.booked_sends == 1
        controller.moved(placement.booking, handoff("p", "e", 1 << 20, 0.1), 1.0)
        assert controller.snapshot(1.0).nodes[-1].booked_sends == 0
        controller.check()

    def test_stays_where_nobody_else_can(self) -> None:
        controller = cluster(p=P, d=D)
        asked = query(prefill_node="p", exclude=frozenset({"d"}))
        assert nodes(controller.place(asked, 0.0)) == ("p", "p")

    def test_nobody(self) -> None:
        controller = cluster(p=P, d=D)
        with pytest.raises(NoNodeAvailable, match="no node but 'p'"):
            controller.place(query(prefill_node="p", exclude=frozenset({"p", "d"})), 0.0)
        with pytest.raises(NoNodeAvailable, match="prefill_node='gone'"):
            controller.place(query(prefill_node="gone"), 0.0)


class TestShortPrompts:
    def place(self, limit: int, tokens: int, **changes: Any) -> tuple[str, str]:
        controller = cluster(config=ControllerConfig(local_prefill_max_tokens=limit), p=P, d=D)
        controller.report("d", 1, node_report(added_blocks=hashes("x", 10)), 0.0)
        return nodes(controller.place(query(num_tokens=tokens, **changes), 0.0))

    def test_off_by_default(self) -> None:
        assert ControllerConfig().local_prefill_max_tokens == 0
        assert self.place(0, 1) == ("p", "d")

    def test_by_what_is_to_be_computed(self) -> None:
        assert self.place(64, 64) == ("d", "d")
        assert self.place(64, 65) == ("p", "d")
        assert self.place(64, 200, block_hashes=hashes("x", 12)) == ("d", "d")

    def test_not_where_it_would_be_later(self) -> None:
        controller = cluster(config=ControllerConfig(local_prefill_max_tokens=64), p=P, d=D)
        waiting = node_load(num_requests_waiting=9, num_waiting_tokens=9000)
        controller.report("d", 1, node_report(waiting), 0.0)
        assert nodes(controller.place(query(num_tokens=60), 0.0)) == ("p", "d")


class TestDecisions:
    def test_every_choice_tells_its_terms(self) -> None:
        controller = cluster(a=P, b=P, d=D, e=D)
        controller.place(query(), 0.0)
        (decision,) = controller.decisions(1)
        assert decision.chosen == "a -> d" and "earliest token" in decision.reason
        by_purpose = Counter(candidate.purpose for candidate in decision.candidates)
        assert by_purpose == {"prefill": 2, "decode": 2}
        assert {"queue_s", "prefill_s", "cached_tokens"} <= set(decision.candidates[0].terms)
        assert {"transfer_s", "occupancy"} <= set(decision.candidates[-1].terms)

    def test_the_chosen_ones_are_shown_of_many(self) -> None:
        controller = Controller()
        for index in range(60):
            controller.join(node_info(f"n{index:02}", P if index % 2 else D), 0.0)
        for index in range(40):
            placement = controller.place(query(f"{index}"), 0.0)
            shown = {c.name for c in controller.decisions(1)[0].candidates}
            assert set(nodes(placement)) <= shown and len(shown) <= 10


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_never_an_excluded_or_leaving_node(data: st.DataObject) -> None:
    roles = data.draw(st.lists(st.sampled_from(list(Role)), min_size=1, max_size=6))
    controller = cluster(**{f"n{index}": role for index, role in enumerate(roles)})
    names = [f"n{index}" for index in range(len(roles))]
    some = st.sets(st.sampled_from(names))
    leaving = data.draw(some)
    for name in names:
        load = node_load(
            num_requests_running=data.draw(st.integers(0, 20)),
            num_waiting_tokens=data.draw(st.integers(0, 5000)),
            kv_cache_usage=data.draw(st.floats(0, 1)),
        )
        controller.report(name, 1, node_report(load), 0.0)
    for name in leaving:
        controller.request_drain(name, 0.0)
    for index in range(8):
        excluded = frozenset(data.draw(some))
        asked = query(f"{index}", data.draw(st.integers(1, 3000)), exclude=excluded)
        left = set(names) - leaving - excluded
        if not left:
            with pytest.raises(NoNodeAvailable):
                controller.place(asked, 0.0)
            continue
        placement = controller.place(asked, 0.0)
        assert {placement.prefill_node, placement.decode_node} <= left
        able = {n for n in left if roles[names.index(n)].can_prefill}
        assert placement.prefill_node in (able or left)
        able = {n for n in left if roles[names.index(n)].can_decode}
        assert placement.decode_node in (able or left)
        controller.check()
