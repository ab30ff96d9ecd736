"""Worker processes: started, watched, started again, and never left behind."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from flowkv_jax.cluster.membership import Membership
from flowkv_jax.controller.role import Role
from flowkv_jax.errors import NotFoundError, ServerError
from flowkv_jax.worker.fleet import Fleet, FleetConfig, SlotState
from flowkv_jax.worker.launcher import (
    LaunchCommand,
    LocalLauncher,
    WorkerExit,
    WorkerHandle,
    share_cpus,
    thread_limits,
)
from tests.cluster_fakes import SECRET, VERSION, RecordingListener, wait_for
from tests.cluster_worker import launch_command

ROOT = Path(__file__).resolve().parents[1]


def script(text: str, **more: object) -> LaunchCommand:
    return LaunchCommand([sys.executable, "-S", "-c", text], **more)  # type: ignore[arg-type]


@contextlib.contextmanager
def launcher(
    command: LaunchCommand, grace_s: float = 60.0
) -> Iterator[tuple[LocalLauncher, io.StringIO]]:
    output = io.StringIO()
    made = LocalLauncher(lambda role, name: command, grace_s=grace_s, output=output)
    try:
        yield made, output
    finally:
        made.close()


def ended(made: LocalLauncher, handle: WorkerHandle) -> WorkerExit:
    found: WorkerExit = wait_for(lambda: made.poll(handle))
    return found


class TestLocalLauncher:
    def test_output_carries_the_name_and_the_last_lines_stay(self) -> None:
        text = (
            "import sys\n"
            "for i in range(30): print('line', i, flush=True)\n"
            "sys.stderr.write('no end')\n"
            "sys.exit(7)"
        )
        with launcher(script(text)) as (made, output):
            found = ended(made, made.start(Role.DECODE, "decode-4"))
        lines = output.getvalue().splitlines()
        assert lines[0] == "decode-4 | line 0" and lines[-1] == "decode-4 | no end"
        assert len(lines) == 31
        assert found.status == 7
        assert found.last_lines == (*(f"line {i}" for i in range(11, 30)), "no end")
        assert str(found).startswith("exit status 7; it said last:\n  line 11\n")

    def test_cpus_and_environment_are_set_before_the_program_starts(self) -> None:
        cpu = min(os.sched_getaffinity(0))
        text = "import os\nprint(os.sched_getaffinity(0), os.environ['NPROC'])"
        command = script(text, environment=thread_limits(1), cpus=(cpu,))
        with launcher(command) as (made, output):
            assert ended(made, made.start(Role.HYBRID, "w")).status == 0
        assert output.getvalue() == f"w | {{{cpu}}} 1\n"

    def test_a_program_that_is_not_there(self) -> None:
        with launcher(LaunchCommand(["/no/such/program"])) as (made, _):
            found = ended(made, made.start(Role.HYBRID, "w"))
        assert found == WorkerExit(127, ("cannot run /no/such/program: No such file or directory",))

    def test_stop_asks_first(self) -> None:
        text = (
            "import signal, sys, time\n"
            "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
            "print('up', flush=True)\n"
            "while True: time.sleep(1)"
        )
        with launcher(script(text)) as (made, output):
            handle = made.start(Role.HYBRID, "w")
            wait_for(lambda: "up" in output.getvalue())
            made.stop(handle, drain=True)
            assert ended(made, handle).status == 5
            made.stop(handle, drain=True)

    def test_stop_at_once(self) -> None:
        with launcher(script("import time\ntime.sleep(600)")) as (made, _):
            handle = made.start(Role.HYBRID, "w")
            made.stop(handle, drain=False)
            assert str(ended(made, handle)) == "killed by SIGKILL"

    def test_whoever_does_not_listen_is_killed_at_the_end(self) -> None:
        text = (
            "import signal, time\n"
            "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "print('up', flush=True)\n"
            "while True: time.sleep(1)"
        )
        with launcher(script(text), grace_s=0.1) as (made, output):
            handle = made.start(Role.HYBRID, "w")
            wait_for(lambda: "up" in output.getvalue())
            made.close()
            assert made.poll(handle) == WorkerExit(-signal.SIGKILL, ("up",))
            with pytest.raises(ServerError, match="closed"):
                made.start(Role.HYBRID, "w")

    def test_a_stopped_one_ends_too(self) -> None:
        with launcher(script("import time\ntime.sleep(600)"), grace_s=0.1) as (made, _):
            handle = made.start(Role.HYBRID, "w")
            os.kill(made.pid(handle), signal.SIGSTOP)

    def test_a_grandchild_that_holds_the_pipe_delays_nothing(self) -> None:
        text = (
            "import subprocess, sys\n"
            "p = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])\n"
            "print(p.pid, flush=True)"
        )
        with launcher(script(text)) as (made, _):
            found = ended(made, made.start(Role.HYBRID, "w"))
            os.kill(int(found.last_lines[0]), signal.SIGKILL)
        assert found.status == 0


@pytest.mark.parametrize("watch_parent", [False, True])
def test_no_worker_outlives_a_killed_front(tmp_path: Path, watch_parent: bool) -> None:
    """With the kernel's help alone, and beside it with the pipe."""
    program = tmp_path / "front.py"
    program.write_text(
        "from flowkv_jax.controller.role import Role\n"
        "from flowkv_jax.worker.launcher import LocalLauncher\n"
        "from tests.cluster_worker import launch_command\n"
        f"command = launch_command(('127.0.0.1', 1), watch_parent={watch_parent})\n"
        "made = LocalLauncher(lambda role, name: command)\n"
        "print(*[made.pid(made.start(Role.HYBRID, f'w-{i}')) for i in range(2)], flush=True)\n",
        encoding="utf-8",
    )
    front = subprocess.Popen(
        [sys.executable, str(program)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert front.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in front.stdout.readline().split()]
        assert len(workers) == 2
    finally:
        front.kill()
        front.wait()
        front.stdout.close()  # type: ignore[union-attr]
    for worker in workers:
        wait_for(lambda worker=worker: _is_gone(worker))


def _is_gone(process: psutil.Process) -> bool:
    # Where nobody reaps orphans they stay as zombies.
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


class FakeLauncher:
    """Workers that end when told to."""

    def __init__(self) -> None:
        self.started: list[FakeHandle] = []
        self.refuses = False

    def start(self, role: Role, name: str) -> WorkerHandle:
        if self.refuses:
            raise ServerError("no room")
        self.started.append(FakeHandle(name))
        return self.started[-1]

    def stop(self, handle: WorkerHandle, *, drain: bool) -> None:
        assert isinstance(handle, FakeHandle)
        handle.told.append(drain)

    def poll(self, handle: WorkerHandle) -> WorkerExit | None:
        assert isinstance(handle, FakeHandle)
        return handle.exit

    def close(self) -> None:
        pass


class FakeHandle:
    def __init__(self, name: str) -> None:
        self.name = name
        self.exit: WorkerExit | None = None
        self.told: list[bool] = []


class TestFleet:
    def make(self) -> tuple[Fleet, FakeLauncher, Callable[[float], None], list[str]]:
        now = [0.0]
        failures: list[str] = []
        made = FakeLauncher()
        config = FleetConfig(restart_pause_s=1, max_restart_pause_s=3, stable_s=100, max_deaths=4)
        fleet = Fleet(made, config, lambda name, reason: failures.append(reason), lambda: now[0])

        def pass_time(seconds: float) -> None:
            now[0] += seconds
            fleet.tick()

        return fleet, made, pass_time, failures

    def test_names(self) -> None:
        fleet, made, _, _ = self.make()
        roles = [Role.PREFILL, Role.DECODE, Role.PREFILL]
        assert [fleet.add(role) for role in roles] == ["prefill-0", "decode-0", "prefill-1"]
        assert [handle.name for handle in made.started] == ["prefill-0", "decode-0", "prefill-1"]
        assert fleet.add(Role.DECODE, taken={"decode-1"}) == "decode-2"

    def test_pauses_double_and_have_an_end(self) -> None:
        fleet, made, pass_time, failures = self.make()
        fleet.add(Role.DECODE)
        for pause_s in (1.0, 2.0, 3.0):
            made.started[-1].exit = WorkerExit(-signal.SIGKILL)
            pass_time(0)
            (slot,) = fleet.slots
            assert slot.state is SlotState.BACKING_OFF
            pass_time(pause_s - 0.01)
            assert len(made.started) == slot.deaths
            pass_time(0.01)
            assert len(made.started) == slot.deaths + 1
        made.started[-1].exit = WorkerExit(1, ("out of memory",))
        pass_time(0)
        pass_time(1000)
        assert [slot.state for slot in fleet.slots] == [SlotState.FAILED]
        assert len(made.started) == 4
        assert failures == [
            "worker decode-0 died 4 times in a row: exit status 1; it said last:\n  out of memory"
        ]
        fleet.retire("decode-0")
        assert fleet.slots == []

    def test_deaths_are_forgiven(self) -> None:
        fleet, made, pass_time, failures = self.make()
        fleet.add(Role.DECODE)
        for _ in range(10):
            pass_time(100)
            made.started[-1].exit = WorkerExit(1)
            pass_time(0)
            pass_time(1)
        assert len(made.started) == 11 and not failures

    def test_a_wrong_command_line_is_not_tried_again(self) -> None:
        fleet, made, pass_time, failures = self.make()
        fleet.add(Role.DECODE)
        made.started[-1].exit = WorkerExit(2, ("unknown model",))
        pass_time(1000)
        assert len(made.started) == 1
        assert "cannot work as it is configured" in failures[0] and "unknown model" in failures[0]

    def test_retire_does_not_restore(self) -> None:
        fleet, made, pass_time, _ = self.make()
        fleet.add(Role.DECODE)
        fleet.retire("decode-0")
        assert made.started[0].told == [True]
        fleet.retire("decode-0", drain=False)
        assert made.started[0].told == [True, False]
        made.started[0].exit = WorkerExit(0)
        pass_time(1000)
        assert fleet.slots == [] and len(made.started) == 1
        with pytest.raises(NotFoundError):
            fleet.retire("decode-0")

    def test_one_that_hangs_is_replaced(self) -> None:
        fleet, made, pass_time, _ = self.make()
        fleet.add(Role.DECODE)
        fleet.kill("decode-0")
        fleet.kill("of another host")
        assert made.started[0].told == [False]
        made.started[0].exit = WorkerExit(-signal.SIGKILL)
        pass_time(0)
        pass_time(1)
        assert [handle.name for handle in made.started] == ["decode-0", "decode-0"]

    def test_a_launcher_that_refuses_is_asked_again(self) -> None:
        fleet, made, pass_time, failures = self.make()
        made.refuses = True
        fleet.add(Role.DECODE)
        assert [slot.state for slot in fleet.slots] == [SlotState.BACKING_OFF]
        made.refuses = False
        pass_time(1)
        assert len(made.started) == 1 and not failures


def test_a_killed_worker_is_restored_and_joins_again() -> None:
    listener = RecordingListener()
    membership = Membership(("127.0.0.1", 0), SECRET, listener, version=VERSION)
    output = io.StringIO()

    def command(role: Role, name: str) -> LaunchCommand:
        return launch_command(membership.address, role=role.value, name=name)

    made = LocalLauncher(command, output=output)
    fleet = Fleet(made, FleetConfig(restart_pause_s=0.01))
    try:
        assert fleet.add(Role.PREFILL) == "prefill-0"
        assert fleet.add(Role.DECODE) == "decode-0"
        listener.port("decode-0")
        listener.port("prefill-0")
        victim = next(m for m in membership.members if m.name == "prefill-0")
        os.kill(victim.join.node.pid, signal.SIGKILL)
        wait_for(lambda: listener.seen("lost", "prefill-0"))
        wait_for(lambda: fleet.tick() or listener.seen("joined", "prefill-0") == [1, 2])
    finally:
        fleet.close()
        membership.close()
    assert "decode-0 | left: drained" in output.getvalue()


@pytest.mark.parametrize(
    ("cpus", "num_workers", "expected"),
    [
        ([0, 1, 2, 3], 2, [(0, 1), (2, 3)]),
        ([4, 5, 6, 7, 8], 2, [(4, 5), (6, 7, 8)]),
        ([0, 1], 2, [(0,), (1,)]),
        ([0, 1], 3, [(0,), (1,), (0,)]),
    ],
)
def test_share_cpus(cpus: list[int], num_workers: int, expected: list[tuple[int, ...]]) -> None:
    assert share_cpus(cpus, num_workers) == expected
