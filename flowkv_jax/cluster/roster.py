"""Who belongs to the cluster: names, epochs, leases. Pure: no threads, no sockets, time comes in.

A member is one membership of one worker, from its welcome to its end:

    ACTIVE -> DRAINING -> GONE        it said that it leaves
    ACTIVE -> GONE                    its connection ended, its lease ran out, or it came anew

A name has at most one member that is not GONE, and the epochs of a name only rise. Whoever lost
its membership without knowing (it was stopped, the network was cut) joins anew under a higher
epoch, and what it still says under the old one is dropped.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from flowkv_jax.cluster.facts import difference, differences, named_facts
from flowkv_jax.cluster.messages import PROTOCOL, Join, Peer
from flowkv_jax.controller.role import Role
from flowkv_jax.controller.snapshot import NodeInfo
from flowkv_jax.errors import ClientError


class MemberState(enum.Enum):
    ACTIVE = enum.auto()
    DRAINING = enum.auto()
    GONE = enum.auto()


LEGAL_MOVES: frozenset[tuple[MemberState, MemberState]] = frozenset(
    {
        (MemberState.ACTIVE, MemberState.DRAINING),
        (MemberState.ACTIVE, MemberState.GONE),
        (MemberState.DRAINING, MemberState.GONE),
    }
)


class JoinRefused(ClientError):
    """A worker may not join. `can_retry`: the reason may go away by itself."""

    def __init__(self, reason: str, *, can_retry: bool = False) -> None:
        super().__init__(reason)
        self.can_retry = can_retry


@dataclass(eq=False, slots=True)
class Member:
    """One membership. Compared by identity; only its `Roster` changes it.

    Attributes:
        role: wanted when it joined.
        join: all that it said of itself.
        heard_s: when it last said anything.
    """

    name: str
    epoch: int
    role: Role
    join: Join
    heard_s: float
    state: MemberState = MemberState.ACTIVE

    @property
    def peer(self) -> Peer:
        """As other members see it."""
        return Peer(self.name, self.epoch, self.join.node.transfer_address)

    @property
    def info(self) -> NodeInfo:
        """As the controller wants it."""
        node, layout = self.join.node, self.join.model.layout
        return NodeInfo(
            name=self.name,
            role=self.role,
            num_blocks=node.num_blocks,
            block_size=layout.block_size,
            max_num_seqs=node.max_num_seqs,
            max_num_batched_tokens=node.max_num_batched_tokens,
            host=node.host_id,
            block_bytes=layout.bytes_per_block,
            relative_speed=node.relative_speed,
        )

    def move_to(self, state: MemberState) -> None:
        """Change `state`; `RuntimeError` if the move is not in `LEGAL_MOVES` (a bug of ours)."""
        if (self.state, state) not in LEGAL_MOVES:
            raise RuntimeError(f"{self.name}: illegal move {self.state.name} -> {state.name}")
        self.state = state


class Roster:
    """The members.

    Args:
        version: of flowkv; joining workers must have the same.
        lease_s: silence after which a member is lost.
        wanted: what every member must be, as far as the front knows (`facts.named_facts`); for the
            rest the first member's word is taken, until nobody is left.
    """

    def __init__(
        self, version: str, lease_s: float, wanted: Mapping[str, object] | None = None
    ) -> None:
        self._version = version
        self._lease_s = lease_s
        self._wanted = dict(wanted or {})
        self._members: dict[str, Member] = {}
        self._epochs: dict[str, int] = {}

    def __contains__(self, member: object) -> bool:
        return isinstance(member, Member) and self._members.get(member.name) is member

    @property
    def members(self) -> list[Member]:
        """All that are not gone, in the order they joined."""
        return list(self._members.values())

    def rival(self, join: Join) -> Member | None:
        """An earlier membership of the very worker that joins; it has to be removed first."""
        for member in self._members.values():
            if member.join.instance == join.instance:
                return member
        return None

    def admit(self, join: Join, now_s: float) -> Member:
        """A new member.

        Raises:
            JoinRefused: it differs in what must be equal (each difference is named), or its name
                is in use.
        """
        self._check(join)
        name = self._name_for(join)
        epoch = 1 + max(self._epochs.get(name, 0), join.epoch)
        self._epochs[name] = epoch
        member = self._members[name] = Member(name, epoch, join.role, join, now_s)
        return member

    def heard(self, member: Member, now_s: float) -> bool:
        """Renew its lease; False if it is a member no more."""
        if member not in self:
            return False
        member.heard_s = now_s
        return True

    def renew_all(self, now_s: float) -> None:
        """Renew every lease: nobody was listening."""
        for member in self._members.values():
            member.heard_s = now_s

    def drain(self, member: Member) -> bool:
        """It finishes what it has and takes nothing new; False if that was known."""
        if member not in self or member.state is not MemberState.ACTIVE:
            return False
        member.move_to(MemberState.DRAINING)
        return True

    def remove(self, member: Member) -> bool:
        """It is gone; False if it was before."""
        if member not in self:
            return False
        del self._members[member.name]
        member.move_to(MemberState.GONE)
        return True

    def expired(self, now_s: float) -> list[Member]:
        """Members whose lease has run out; they stay members until they are removed."""
        return [m for m in self._members.values() if now_s - m.heard_s > self._lease_s]

    def check(self) -> None:
        """Raise `RuntimeError` where the books contradict each other."""
        for name, member in self._members.items():
            if member.name != name or member.state is MemberState.GONE:
                raise RuntimeError(f"{member.name} ({member.state.name}) is listed as {name}")
            if member.epoch != self._epochs[name]:
                raise RuntimeError(f"{name}: epoch {member.epoch}, {self._epochs[name]} was given")
        instances = [m.join.instance for m in self._members.values()]
        if len(set(instances)) != len(instances):
            raise RuntimeError("one worker is a member twice")

    def _check(self, join: Join) -> None:
        found = []
        if join.protocol != PROTOCOL:
            found.append(difference("protocol", PROTOCOL, join.protocol))
        if join.version != self._version:
            found.append(difference("flowkv version", self._version, join.version))
        wanted = self._wanted
        for member in self._members.values():  # they are all alike
            wanted = named_facts(member.join.model) | wanted
            break
        found += differences(wanted, join.model)
        if found:
            raise JoinRefused("the worker differs from the cluster: " + "; ".join(found))

    def _name_for(self, join: Join) -> str:
        if join.name:
            holder = self._members.get(join.name)
            if holder is None:
                return join.name
            if join.is_name_fixed:
                raise JoinRefused(
                    f"the name {join.name!r} is in use by process {holder.join.node.pid} on host "
                    f"{holder.join.node.host_id}; give one of them another --name",
                    can_retry=True,
                )
        index = 0
        while (name := f"{join.role.value}-{index}") in self._members:
            index += 1
        return name
