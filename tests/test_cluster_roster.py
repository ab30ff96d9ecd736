"""Names, epochs and leases, with a clock moved by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from flowkv_jax.cluster.facts import named_facts
from flowkv_jax.cluster.messages import PROTOCOL, Join
from flowkv_jax.cluster.roster import JoinRefused, Member, MemberState, Roster
from flowkv_jax.controller.role import Role
from tests.cluster_fakes import VERSION, model_facts, node_facts

LEASE_S = 3.0


def join(instance: str, name: str = "", *, fixed: bool = False, **changes: Any) -> Join:
    values: dict[str, Any] = {
        "protocol": PROTOCOL,
        "version": VERSION,
        "instance": instance,
        "name": name,
        "is_name_fixed": fixed,
        "epoch": 0,
        "role": Role.PREFILL,
        "model": model_facts(),
        "node": node_facts(pid=4711, host_id="host"),
    }
    return Join(**(values | changes))


def roster() -> Roster:
    return Roster(VERSION, LEASE_S)


def test_the_lowest_free_name_is_chosen() -> None:
    made = roster()
    members = [made.admit(join(f"{i}"), 0.0) for i in range(3)]
    assert [m.name for m in members] == ["prefill-0", "prefill-1", "prefill-2"]
    made.remove(members[1])
    assert made.admit(join("4"), 0.0).name == "prefill-1"
    assert made.admit(join("5", role=Role.DECODE), 0.0).name == "decode-0"


def test_epochs_rise_with_each_membership_of_a_name() -> None:
    made = roster()
    for epoch in (1, 2, 3):
        member = made.admit(join(f"{epoch}", "w"), 0.0)
        assert (member.name, member.epoch) == ("w", epoch)
        made.remove(member)
    # A front that restarted knows of no epochs; its workers do.
    assert roster().admit(join("1", "w", epoch=7), 0.0).epoch == 8


def test_a_name_in_use() -> None:
    made = roster()
    made.admit(join("1", "w", fixed=True), 0.0)
    with pytest.raises(JoinRefused, match="'w' is in use by process 4711 on host host") as caught:
        made.admit(join("2", "w", fixed=True), 0.0)
    assert caught.value.can_retry
    # One that only happened to have that name before takes another.
    assert made.admit(join("3", "w"), 0.0).name == "prefill-0"


def test_everything_that_differs_is_named_at_once() -> None:
    made = Roster(VERSION, LEASE_S, named_facts(model_facts()))
    odd = join(
        "1",
        protocol=2,
        version="0.9",
        model=model_facts(dtype="bfloat16", dtype_bytes=2, head_dim=16),
    )
    with pytest.raises(JoinRefused) as caught:
        made.admit(odd, 0.0)
    assert str(caught.value) == (
        "the worker differs from the cluster: protocol 1 in the cluster, 2 at the worker; "
        f"flowkv version {VERSION} in the cluster, 0.9 at the worker; "
        "head_dim 8 in the cluster, 16 at the worker; "
        "dtype float32 in the cluster, bfloat16 at the worker"
    )
    assert not caught.value.can_retry


def test_one_that_is_refused_sets_no_standard() -> None:
    made = roster()
    with pytest.raises(JoinRefused):
        made.admit(join("1", version="0.9", model=model_facts(block_size=8)), 0.0)
    made.admit(join("2"), 0.0)


def test_the_first_sets_the_standard_while_anybody_is_there() -> None:
    made = roster()
    first = made.admit(join("1", model=model_facts(block_size=8)), 0.0)
    with pytest.raises(JoinRefused, match="block_size 8 in the cluster, 16 at the worker"):
        made.admit(join("2"), 0.0)
    made.remove(first)
    made.admit(join("2"), 0.0)


def test_what_the_front_knows_is_no_matter_of_who_comes_first() -> None:
    made = Roster(VERSION, LEASE_S, {"dtype": "float32"})
    with pytest.raises(JoinRefused, match="dtype float32 in the cluster, bfloat16 at the worker"):
        made.admit(join("1", model=model_facts(dtype="bfloat16", dtype_bytes=2)), 0.0)
    made.admit(join("2"), 0.0)


def test_draining_ends_in_gone() -> None:
    made = roster()
    member = made.admit(join("1"), 0.0)
    assert made.drain(member) and not made.drain(member)
    assert made.remove(member) and not made.remove(member) and not made.drain(member)
    assert member.state is MemberState.GONE
    with pytest.raises(RuntimeError, match="GONE -> ACTIVE"):
        member.move_to(MemberState.ACTIVE)


class RosterMachine(RuleBasedStateMachine):
    """Against a plain list of who is there."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.roster = roster()
        self.there: list[Member] = []
        self.gone: list[Member] = []
        self.epochs: dict[str, int] = {}
        self.num_instances = 0

    @rule(name=st.sampled_from(["", "a", "b", "prefill-0"]), fixed=st.booleans())
    def someone_joins(self, name: str, fixed: bool) -> None:
        self.num_instances += 1
        names = {member.name for member in self.there}
        try:
            member = self.roster.admit(join(f"{self.num_instances}", name, fixed=fixed), self.now_s)
        except JoinRefused:
            assert fixed and name in names
            return
        assert member.name not in names
        assert not (fixed and name) or member.name == name
        assert member.epoch == self.epochs.get(member.name, 0) + 1
        self.epochs[member.name] = member.epoch
        self.there.append(member)

    @rule(data=st.data())
    def someone_comes_anew(self, data: st.DataObject) -> None:
        if not self.there:
            return
        member = data.draw(st.sampled_from(self.there))
        again = join(member.join.instance, member.name, epoch=member.epoch)
        assert self.roster.rival(again) is member
        self._goes(member)
        new = self.roster.admit(again, self.now_s)
        assert (new.name, new.epoch) == (member.name, member.epoch + 1)
        self.epochs[new.name] = new.epoch
        self.there.append(new)

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.5]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        late = [m for m in self.there if self.now_s - m.heard_s > LEASE_S]
        assert self.roster.expired(self.now_s) == late
        for member in late:
            self._goes(member)

    @rule(data=st.data())
    def someone_speaks(self, data: st.DataObject) -> None:
        everyone = self.there + self.gone
        if everyone:
            member = data.draw(st.sampled_from(everyone))
            assert self.roster.heard(member, self.now_s) == (member in self.there)

    @rule(data=st.data())
    def someone_drains_or_goes(self, data: st.DataObject) -> None:
        if self.there:
            member = data.draw(st.sampled_from(self.there))
            if data.draw(st.booleans()):
                self.roster.drain(member)
            else:
                self._goes(member)

    def _goes(self, member: Member) -> None:
        assert self.roster.remove(member)
        self.there.remove(member)
        self.gone.append(member)

    @invariant()
    def books_agree(self) -> None:
        self.roster.check()
        assert self.roster.members == self.there
        assert all(member.state is MemberState.GONE for member in self.gone)


TestRosterMachine = RosterMachine.TestCase
