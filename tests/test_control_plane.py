"""Membership, controller, dispatcher and fleet together, over workers that count: who comes, who
is sent away, who is started again."""

from __future__ import annotations

import contextlib
import io
import os
import signal
from collections.abc import Iterator

import pytest

from flowkv_jax.cluster.control_plane import ControlPlane
from flowkv_jax.cluster.dispatch_view import DispatchView
from flowkv_jax.cluster.roster import Member
from flowkv_jax.config import ServeConfig, load_config
from flowkv_jax.controller.actions import AddNode
from flowkv_jax.controller.role import Role
from flowkv_jax.controller.snapshot import NodeState
from flowkv_jax.errors import ConfigError
from flowkv_jax.worker.fleet import Fleet, FleetConfig, SlotState
from flowkv_jax.worker.launcher import LaunchCommand, LocalLauncher
from tests.cluster_fakes import SECRET, VERSION, wait_for
from tests.cluster_worker import launch_command, worker_process

QUICK = FleetConfig(restart_pause_s=0.05, max_restart_pause_s=0.05)


class Plane:
    """A control plane with a fleet whose workers count."""

    def __init__(self, **options: object) -> None:
        config = load_config(ServeConfig, overrides={"lease_s": 1.0, "enable_role_switch": False})
        self.control = ControlPlane(config, version=VERSION, secret=SECRET)
        self.view = DispatchView(self.control.dispatcher, self.control.controller)
        self._options = options
        self.fleet = Fleet(LocalLauncher(self._command, output=io.StringIO()), QUICK)

    def _command(self, role: Role, name: str) -> LaunchCommand:
        address = self.control.membership.address
        return launch_command(address, role=role.value, name=name, **self._options)

    @property
    def epochs(self) -> dict[str, int]:
        return {member.name: member.epoch for member in self.control.members}

    def member(self, name: str) -> Member:
        return next(m for m in self.control.members if m.name == name)


@contextlib.contextmanager
def plane(num_workers: int, **options: object) -> Iterator[Plane]:
    made = Plane(**options)
    try:
        for _ in range(num_workers):
            made.fleet.add(Role.HYBRID)
        made.control.start(made.fleet)
        wait_for(lambda: len(made.control.members) == num_workers or options.get("version"))
        made.control.begin_policy()
        yield made
    finally:
        made.control.close()


def test_a_worker_that_leaves_by_itself_is_replaced() -> None:
    with plane(2) as made:
        os.kill(made.member("hybrid-0").join.node.pid, signal.SIGTERM)
        wait_for(lambda: made.epochs == {"hybrid-0": 2, "hybrid-1": 1})


def test_a_worker_that_hangs_is_replaced() -> None:
    with plane(1) as made:
        pid = made.member("hybrid-0").join.node.pid
        os.kill(pid, signal.SIGSTOP)
        wait_for(lambda: made.epochs == {"hybrid-0": 2})
        assert made.member("hybrid-0").join.node.pid != pid


def test_a_worker_that_is_drained_goes_for_good() -> None:
    with plane(2) as made:
        made.view.drain("hybrid-0")
        wait_for(lambda: made.epochs == {"hybrid-1": 1})
        wait_for(lambda: [slot.name for slot in made.fleet.slots] == ["hybrid-1"])


def test_a_worker_of_elsewhere_that_is_drained_leaves() -> None:
    with plane(1) as made, worker_process(made.control.membership.address, name="x") as process:
        wait_for(lambda: "x" in made.epochs)
        made.view.drain("x")
        wait_for(lambda: made.epochs == {"hybrid-0": 1})
        assert process.wait(60) == 0


def test_one_more_is_added_under_a_name_that_is_free() -> None:
    with plane(1) as made, worker_process(made.control.membership.address, name="hybrid-1"):
        wait_for(lambda: "hybrid-1" in made.epochs)
        made.control._carry_out(AddNode(Role.HYBRID, "for a test"))
        wait_for(lambda: sorted(made.epochs) == ["hybrid-0", "hybrid-1", "hybrid-2"])


def test_a_role_is_told_and_shown() -> None:
    with plane(2) as made:
        made.view.set_role("hybrid-0", Role.PREFILL)

        def shown() -> dict[str, tuple[Role, NodeState]]:
            return {node.name: (node.role, node.state) for node in made.view.snapshot().nodes}

        wait_for(lambda: shown()["hybrid-0"] == (Role.PREFILL, NodeState.ACTIVE))
        assert shown()["hybrid-1"] == (Role.HYBRID, NodeState.ACTIVE)


def test_it_lives_while_workers_can_be_started() -> None:
    with plane(1, version="other") as made:
        assert made.control.is_alive
        wait_for(lambda: not made.control.is_alive)
        assert [slot.state for slot in made.fleet.slots] == [SlotState.FAILED]
        assert "flowkv version" in made.fleet.slots[0].last_death


def test_without_a_secret_nobody_joins_from_elsewhere() -> None:
    config = load_config(ServeConfig, overrides={"cluster_host": "0.0.0.0"})
    with pytest.raises(ConfigError, match="without a secret"):
        ControlPlane(config, version=VERSION, secret=b"")
