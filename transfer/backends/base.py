"""What a backend is: the two halves of a leg, and the line between them.

A backend that crosses processes (`LinkBackend`) has two halves, one in each engine:

    source's engine                                   destination's engine
    half = backend.offer(source, plan, peer)
      half.opening ──────── with the OFFER ─────────> backend.receive(link, destination,
    half.run(link)  <────── link.put / link.get ───>                  plan, opening, peer)
    half.close()    <────── DONE or FAILED ─────────    returns, or raises

- `offer` runs in the submitting thread. It is quick, never blocks, and does nothing that `close`
  does not undo. Where the opening is all that the other side needs, it sets `needs_run=False`,
  and the source spends no thread on the leg.
- `run` and `receive` run in worker threads, one each, and may take as long as the leg takes. They
  speak through their `Link`; its calls raise as soon as the leg is cancelled, past its deadline,
  or its peer lost, and so does `link.check()`, which a half calls between pieces of work.
- `receive` returns the number of calls it executed once every byte is in the destination's pool.
  A leg of at most `inline_receive_bytes` is received by the thread that reads the channel, and
  `receive` must not call `link.get` then.
- `close` is called exactly once, after both halves have stopped, whatever happened.

Rules that keep wrong bytes out of a cache:

1. Only the process that owns a pool writes to it, and only inside `receive`. When `receive` has
   returned or raised, nothing writes any more, whatever becomes of the peer.
2. A half that has started other threads or calls waits for all of them before it ends.
3. Where the destination reads the source's memory by itself, it must prove at the end that the
   source had not given the blocks up (see `Lease` in `shared_memory`): the source may have been
   lost, and have ended the transfer, in the middle.
4. A half that fails raises; the engine tells the other side, waits for it, frees and reports.

State that lives as long as a connection (segments, streams, registered memory) is the backend's:
`hello` goes to every peer when it connects, `peer_lost` and `close` end what was made for it.

A backend within one process (`LocalMover`) has one method, which moves everything.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from pallas_kernels.kv_layout import KVLayout
from transfer.connection import Connection
from transfer.pool_access import PoolAccess
from transfer.strategies import Calls, Strategy, calls_of
from transfer.types import BlockRun

if TYPE_CHECKING:
    from transfer.dialler import Dialler


@dataclass(frozen=True, slots=True)
class Plan:
    """One leg: what moves, and over what.

    Attributes:
        transfer: names the transfer.
        leg: unique at the source's engine.
        src, dst: node names.
        hops: node names of the route, `src` and `dst` included.
        runs: blocks.
        layout: of both pools.
        strategy: grain of the calls.
    """

    transfer: str
    leg: int
    src: str
    dst: str
    hops: tuple[str, ...]
    runs: tuple[BlockRun, ...]
    layout: KVLayout
    strategy: Strategy = Strategy.ALIGNED_RUNS
    _calls: list[Calls] = field(init=False, repr=False, compare=False, default_factory=list)

    @property
    def calls(self) -> Calls:
        """The calls of the strategy; made when first asked for."""
        if not self._calls:
            self._calls.append(calls_of(self.strategy, self.runs, self.layout))
        return self._calls[0]

    @property
    def data_bytes(self) -> int:
        return self.num_blocks * self.layout.bytes_per_block

    @property
    def num_blocks(self) -> int:
        return sum(run.num_blocks for run in self.runs)


@dataclass(frozen=True, slots=True)
class Peer:
    """A connected engine, as backends see it.

    Attributes:
        engine_id: a restarted process has another one.
        same_host: see `host`.
        hellos: what its backends announced, by name.
        address: where it listens; None where it connected to us.
    """

    engine_id: str
    same_host: bool
    hellos: dict[str, bytes]
    address: tuple[str, int] | None


class Link(Protocol):
    """The line between the two halves of one leg."""

    def put(self, body: bytes) -> None:
        """Send a small message to the other half."""

    def get(self, timeout_s: float | None = None) -> bytes:
        """The other half's next message, in order.

        Raises:
            TimeoutError: nothing came within `timeout_s`.
            Cancelled, DeadlineExceeded, PeerLost, BackendError: the leg is over.
        """

    def check(self) -> None:
        """Raise what `get` would, if the leg is over."""

    def on_stop(self, callback: Callable[[], None]) -> None:
        """Call this once when the leg is stopped from outside: to wake a half that blocks."""


class SendHalf(ABC):
    """The source's half of a leg.

    Attributes:
        opening: goes with the offer.
        needs_run: `run` has something to do.
    """

    opening: bytes = b""
    needs_run: bool = True

    def run(self, link: Link) -> None:
        """Do the source's part. Returns when the source's memory is needed no more by it."""
        raise NotImplementedError(f"{type(self).__name__} has nothing to run")

    @abstractmethod
    def close(self) -> None:
        """Undo `offer`. Called once, after both halves have stopped."""


class LinkBackend(ABC):
    """Moves blocks between two engines. See the module's text for the rules."""

    name: str
    receives_inline = False
    """Whether `receive` of a leg of at most `inline_bytes` does without `link.get`."""

    def hello(self) -> bytes | None:
        """What the other half must know of this process; None where this backend cannot work."""
        return b""

    @abstractmethod
    def why_not(self, peer: Peer) -> str:
        """Why this backend cannot serve the peer; empty if it can."""

    @abstractmethod
    def offer(self, source: PoolAccess, plan: Plan, peer: Peer) -> SendHalf:
        """Begin the source's half."""

    @abstractmethod
    def receive(
        self, link: Link, destination: PoolAccess, plan: Plan, opening: bytes, peer: Peer
    ) -> int:
        """Do the destination's half; returns the calls executed."""

    def inline_receive_bytes(self, opening: bytes, inline_bytes: int) -> int:
        """Up to which size a leg of this opening is received by the thread that reads the channel.

        Args:
            inline_bytes: the engine's setting.
        """
        return inline_bytes if self.receives_inline else 0

    def attach(self, dialler: Dialler) -> None:
        """The engine that this backend works for gives its way to open connections, for purposes
        that start with the backend's name and a colon."""
        return

    def accept_stream(self, connection: Connection) -> bool:
        """Take a data stream that a peer has opened with purpose "<name>:..."; False to refuse."""
        return False

    def peer_lost(self, engine_id: str) -> None:
        """The connection ended; its legs are stopping, or have stopped. Idempotent."""
        return

    def close(self) -> None:
        """Release everything. No leg is running. Idempotent."""
        return


class LocalMover(ABC):
    """Moves blocks between two pools of one process."""

    name: str

    @abstractmethod
    def move(
        self, source: PoolAccess, destination: PoolAccess, plan: Plan, check: Callable[[], None]
    ) -> int:
        """Move everything; returns the calls executed. Calls `check` between pieces of work."""

    def close(self) -> None:
        """Release everything. Idempotent."""
        return
