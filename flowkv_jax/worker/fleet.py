"""Keeps the wanted workers running. No JAX.

A slot is one wanted worker; its name stays the same however often it is started:

    RUNNING -> BACKING_OFF        it died
    BACKING_OFF -> RUNNING        it was started again, after a pause that doubles with each death
    RUNNING, BACKING_OFF -> FAILED     it died too often in a row, or says that its command line
                                  or configuration is wrong: starting it again would not help
    RUNNING -> STOPPING -> GONE   it was retired
    BACKING_OFF, FAILED -> GONE   likewise

A worker that lived for `stable_s` has its deaths forgiven.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Callable, Container
from dataclasses import dataclass

from flowkv_jax.config_section import Section
from flowkv_jax.controller.role import Role
from flowkv_jax.errors import NotFoundError, ServerError
from flowkv_jax.worker.launcher import Launcher, WorkerExit, WorkerHandle

logger = logging.getLogger(__name__)

EXIT_CLIENT = 2
"""What `flowkv` exits with where starting it again cannot help; see `cli`."""


class SlotState(enum.Enum):
    RUNNING = enum.auto()
    BACKING_OFF = enum.auto()
    STOPPING = enum.auto()
    FAILED = enum.auto()
    GONE = enum.auto()


LEGAL_MOVES: frozenset[tuple[SlotState, SlotState]] = frozenset(
    {
        (SlotState.RUNNING, SlotState.BACKING_OFF),
        (SlotState.RUNNING, SlotState.STOPPING),
        (SlotState.RUNNING, SlotState.FAILED),
        (SlotState.BACKING_OFF, SlotState.RUNNING),
        (SlotState.BACKING_OFF, SlotState.FAILED),
        (SlotState.BACKING_OFF, SlotState.GONE),
        (SlotState.STOPPING, SlotState.GONE),
        (SlotState.FAILED, SlotState.GONE),
    }
)


class FleetConfig(Section, frozen=True, kw_only=True):
    """How dead workers are started again.

    Attributes:
        restart_pause_s: before the first time; doubles with each death in a row.
        max_restart_pause_s: the longest pause.
        stable_s: a worker that lived so long has its deaths forgiven.
        max_deaths: so many in a row, and it is given up.
    """

    restart_pause_s: float = 0.5
    max_restart_pause_s: float = 30.0
    stable_s: float = 60.0
    max_deaths: int = 5

    def __post_init__(self) -> None:
        self.require_positive("restart_pause_s", "max_restart_pause_s", "stable_s", "max_deaths")


@dataclass(eq=False, slots=True)
class _Slot:
    name: str
    role: Role
    handle: WorkerHandle | None = None
    state: SlotState = SlotState.BACKING_OFF
    deaths: int = 0
    last_death: str = ""
    started_s: float = 0.0
    due_s: float = 0.0

    def move_to(self, state: SlotState) -> None:
        if (self.state, state) not in LEGAL_MOVES:
            raise RuntimeError(f"{self.name}: illegal move {self.state.name} -> {state.name}")
        self.state = state


@dataclass(frozen=True, slots=True)
class SlotView:
    """One wanted worker, for those who show it.

    Attributes:
        deaths: in a row.
        last_death: how it died last; empty if it has not.
    """

    name: str
    role: Role
    state: SlotState
    deaths: int
    last_death: str = ""


class Fleet:
    """The wanted workers; owns the launcher. Any thread may call.

    Args:
        on_failure: hears (name, reason) of a worker that is given up. Must not block.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        launcher: Launcher,
        config: FleetConfig | None = None,
        on_failure: Callable[[str, str], None] = lambda name, reason: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._launcher = launcher
        self._config = config or FleetConfig()
        self._on_failure = on_failure
        self._clock = clock
        self._lock = threading.RLock()
        self._slots: dict[str, _Slot] = {}
        self._is_closed = False

    @property
    def slots(self) -> list[SlotView]:
        with self._lock:
            return [
                SlotView(s.name, s.role, s.state, s.deaths, s.last_death)
                for s in self._slots.values()
            ]

    def add(self, role: Role, taken: Container[str] = ()) -> str:
        """Want one more; returns its name, such as "prefill-0".

        Args:
            taken: names of workers that were started elsewhere.

        Raises:
            ServerError: the fleet is closed.
        """
        with self._lock:
            if self._is_closed:
                raise ServerError("no worker can be added: the fleet is closed")
            index = 0
            while (name := f"{role.value}-{index}") in self._slots or name in taken:
                index += 1
            slot = self._slots[name] = _Slot(name, role)
            self._start(slot)
            return name

    def retire(self, name: str, *, drain: bool = True) -> None:
        """Want it no more: it finishes what runs and leaves, or ends at once.

        Raises:
            NotFoundError: there is no such worker here.
        """
        with self._lock:
            slot = self._slot(name)
            if slot.state is SlotState.RUNNING:
                slot.move_to(SlotState.STOPPING)
            elif slot.state is not SlotState.STOPPING:
                slot.move_to(SlotState.GONE)
                del self._slots[name]
                return
            if slot.handle is not None:
                self._launcher.stop(slot.handle, drain=drain)

    def kill(self, name: str, started_before_s: float | None = None) -> None:
        """End its process at once, and start it again: it hangs. Unknown names, which were started
        elsewhere, are passed over.

        Args:
            started_before_s: leave it alone if it was started later, on the fleet's clock: it is
                not the one that hung.
        """
        with self._lock:
            slot = self._slots.get(name)
            if slot is None or slot.handle is None:
                return
            if started_before_s is None or slot.started_s < started_before_s:
                self._launcher.stop(slot.handle, drain=False)

    def tick(self) -> None:
        """Notice those that ended, and start those that are due."""
        with self._lock:
            if self._is_closed:
                return
            now_s = self._clock()
            for slot in list(self._slots.values()):
                if slot.state in (SlotState.RUNNING, SlotState.STOPPING):
                    ended = self._launcher.poll(slot.handle) if slot.handle is not None else None
                    if ended is not None:
                        self._ended(slot, ended, now_s)
                elif slot.state is SlotState.BACKING_OFF and now_s >= slot.due_s:
                    self._start(slot)

    def close(self) -> None:
        """Stop all workers and wait. Idempotent."""
        with self._lock:
            self._is_closed = True
        self._launcher.close()

    def _slot(self, name: str) -> _Slot:
        slot = self._slots.get(name)
        if slot is None:
            raise NotFoundError(f"no worker {name!r} was started here; there are {[*self._slots]}")
        return slot

    def _start(self, slot: _Slot) -> None:
        slot.started_s = self._clock()
        try:
            slot.handle = self._launcher.start(slot.role, slot.name)
        except ServerError as error:
            slot.last_death = str(error)
            self._died(slot, slot.last_death, slot.started_s)
        else:
            slot.move_to(SlotState.RUNNING)

    def _ended(self, slot: _Slot, ended: WorkerExit, now_s: float) -> None:
        slot.handle = None
        slot.last_death = str(ended)
        if slot.state is SlotState.STOPPING:
            slot.move_to(SlotState.GONE)
            del self._slots[slot.name]
            logger.info("worker %s has been stopped: %s", slot.name, ended)
        elif ended.status == EXIT_CLIENT:
            self._give_up(slot, f"worker {slot.name} cannot work as it is configured: {ended}")
        else:
            self._died(slot, str(ended), now_s)

    def _died(self, slot: _Slot, how: str, now_s: float) -> None:
        config = self._config
        if now_s - slot.started_s >= config.stable_s:
            slot.deaths = 0
        slot.deaths += 1
        if slot.deaths >= config.max_deaths:
            self._give_up(slot, f"worker {slot.name} died {slot.deaths} times in a row: {how}")
            return
        pause_s = min(config.restart_pause_s * 2 ** (slot.deaths - 1), config.max_restart_pause_s)
        slot.due_s = now_s + pause_s
        if slot.state is SlotState.RUNNING:
            slot.move_to(SlotState.BACKING_OFF)
        logger.warning(
            "worker %s died (%d in a row), starts again in %.1f s: %s",
            *(slot.name, slot.deaths, pause_s, how),
        )

    def _give_up(self, slot: _Slot, reason: str) -> None:
        slot.move_to(SlotState.FAILED)
        logger.error("%s", reason)
        self._on_failure(slot.name, reason)
