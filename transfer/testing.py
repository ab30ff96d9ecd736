"""For tests of code that transfers: a backend that fails on cue, a clock moved by hand, pairs of
engines in one process, and messages that get lost.

    backend = ScriptedBackend([Fault.DESTINATION_FAILS, Fault.NONE])
    with engine_pair([backend]) as (source, destination):
        ...
"""

from __future__ import annotations

import enum
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from transfer.arrival import Arrival
from transfer.backends.base import Link, LinkBackend, Peer, Plan, SendHalf
from transfer.backends.inline import InlineSend, receive_inline
from transfer.config import TransferConfig
from transfer.engine import TransferEngine
from transfer.errors import BackendError
from transfer.messages import Message
from transfer.pool_access import PoolAccess


class Fault(enum.Enum):
    """What goes wrong with a leg."""

    NONE = "none"
    OFFER_FAILS = "offer fails"
    SOURCE_FAILS = "source fails"
    DESTINATION_FAILS = "destination fails"
    CORRUPT_BYTE = "corrupt byte"
    SOURCE_HANGS = "source hangs"
    DESTINATION_HANGS = "destination hangs"


class ManualClock:
    """A clock that stands still until it is moved. Seconds."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self._now_s = now_s

    def __call__(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        self._now_s += seconds


class ScriptedBackend(LinkBackend):
    """Carries the bytes with the offer, and lets each leg in turn suffer the next fault.

    Only the source's script counts; the destination's half reads the fault from the offer. Legs
    after the end of the script suffer none. A half that hangs ends when its leg is stopped.

    Args:
        faults: the script.
        name: several may be in one engine under different names.

    Attributes:
        received: plans of the legs that came to this end.
        corrupted: transfers that a byte was changed of.
        opened_halves, closed_halves: source's halves that began and that were closed.
    """

    def __init__(self, faults: Iterable[Fault] = (), name: str = "tcp") -> None:
        self.name = name
        self.received: list[Plan] = []
        self.corrupted: list[str] = []
        self.opened_halves = 0
        self.closed_halves = 0
        self._faults = deque(faults)
        self._lock = threading.Lock()

    def set_script(self, faults: Iterable[Fault]) -> None:
        """What the next legs suffer, instead of what was left of the script."""
        with self._lock:
            self._faults = deque(faults)

    @property
    def num_left(self) -> int:
        """Faults of the script that no leg has suffered yet."""
        with self._lock:
            return len(self._faults)

    def why_not(self, peer: Peer) -> str:
        return "" if self.name in peer.hellos else f"the peer has no backend {self.name!r}"

    def offer(self, source: PoolAccess, plan: Plan, peer: Peer) -> SendHalf:
        with self._lock:
            fault = self._faults.popleft() if self._faults else Fault.NONE
        if fault is Fault.OFFER_FAILS:
            raise BackendError("scripted: the offer fails")
        if fault is Fault.CORRUPT_BYTE:
            self.corrupted.append(plan.transfer)
        self.opened_halves += 1
        return _ScriptedSend(self, fault, source, plan)

    def receive(
        self, link: Link, destination: PoolAccess, plan: Plan, opening: bytes, peer: Peer
    ) -> int:
        self.received.append(plan)
        name, _, data = opening.partition(b"|")
        fault = Fault(name.decode())
        if fault is Fault.DESTINATION_HANGS or fault is Fault.SOURCE_HANGS:
            link.get()
        if fault is Fault.SOURCE_FAILS:
            # The source's failure reaches us as the leg's end.
            link.get()
        if fault is Fault.DESTINATION_FAILS:
            raise BackendError("scripted: the destination fails")
        if fault is Fault.CORRUPT_BYTE:
            data = bytes([data[0] ^ 1]) + data[1:]
        receive_inline(destination, plan, data)
        return len(plan.calls)


class _ScriptedSend(InlineSend):
    needs_run = True

    def __init__(
        self, backend: ScriptedBackend, fault: Fault, source: PoolAccess, plan: Plan
    ) -> None:
        super().__init__(fault.value.encode() + b"|", source, plan)
        self._backend = backend
        self._fault = fault

    def run(self, link: Link) -> None:
        if self._fault is Fault.SOURCE_FAILS:
            raise BackendError("scripted: the source fails")
        if self._fault is Fault.SOURCE_HANGS:
            link.get()

    def close(self) -> None:
        self._backend.closed_halves += 1


class Arrivals:
    """An `on_arrival` that keeps what it is told."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._by_name: dict[str, Arrival] = {}

    def __call__(self, arrival: Arrival) -> None:
        with self._condition:
            assert arrival.transfer not in self._by_name, "a transfer became final twice"
            self._by_name[arrival.transfer] = arrival
            self._condition.notify_all()

    def wait(self, transfer: str | None = None, timeout_s: float = 10.0) -> Arrival:
        """The arrival of that name, or the first one."""
        with self._condition:
            found = self._condition.wait_for(
                lambda: transfer in self._by_name if transfer else bool(self._by_name), timeout_s
            )
            if not found:
                raise TimeoutError(f"no arrival of {transfer} within {timeout_s} s")
            return self._by_name[transfer] if transfer else next(iter(self._by_name.values()))


@contextmanager
def engine_pair(
    backends: Iterable[LinkBackend] | None = None,
    config: TransferConfig | None = None,
    *,
    arrivals: Arrivals | None = None,
    clock: ManualClock | None = None,
) -> Iterator[tuple[TransferEngine, TransferEngine]]:
    """Two engines in this process, the destination listening; `connect` comes after the pools.

    Args:
        backends: of the source; the destination gets plain ones of the same names. None for the
            real ones on both sides.
        clock: of the source.
    """
    sent = None if backends is None else list(backends)
    received = None if sent is None else [ScriptedBackend(name=b.name) for b in sent]
    source = TransferEngine(config, backends=sent, clock=clock)
    destination = TransferEngine(config, backends=received, on_arrival=arrivals or Arrivals())
    try:
        destination.listen()
        yield source, destination
    finally:
        source.close()
        destination.close()


def lose_messages(engine: TransferEngine, kind: type, count: int) -> list[Message]:
    """Lose the next `count` messages of a kind that `engine` sends; returns those lost so far."""
    lost: list[Message] = []

    def is_lost(message: Message) -> bool:
        if isinstance(message, kind) and len(lost) < count:
            lost.append(message)
            return True
        return False

    engine.lose(is_lost)
    return lost
