"""Between two JAX processes, of one host or of two: `jax.experimental.transfer`.

    source                                            destination
    OFFER first uuid  ──────────────────────────────> connects to the source's transfer server
    copies call i, `await_pull(uuid + i, arrays)`
    note: calls offered so far  ────────────────────> `pull(uuid + i, arrays)`, then into the pool
                              <──────────────────── note: calls done so far

One call is one pull. What is pulled is a copy of the blocks, never the pool: a peer that is late,
stopped or lost neither holds the pool's memory nor sees blocks that have been given up. At most
`_WINDOW_BYTES` of copies (or one call) wait to be pulled.

A call of n blocks is pulled as arrays of powers of two of blocks, largest first, none longer than
`_PIECE_BYTES`. So the programs that slice blocks out of a device's pool and put them back are
compiled for few shapes, no byte is moved in vain, and what has arrived is written while the rest
still comes. Both sides derive the pieces from the plan.

JAX's transfer server authenticates nobody and encrypts nothing: whoever can connect to it and
knows a uuid gets the array. Uuids start at a random 63-bit number for each leg, told over the
engines' authenticated channel only, and an array can be pulled once. The server listens on
loopback unless the engine has a secret. Keep its port from strangers all the same: bytes that are
not its protocol can abort the process.

JAX keeps an offered array until it is pulled. There is no call to take an offer back, `timeout` of
`await_pull` has no effect in jaxlib 0.10.2, and dropping the server frees nothing. So, once both
halves have stopped, the source pulls itself what is left (`_Leftovers`).
"""

from __future__ import annotations

import secrets
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from pallas_kernels.kv_layout import storage_dtype
from transfer.backends.base import Link, LinkBackend, Peer, Plan, SendHalf
from transfer.config import TransferConfig
from transfer.errors import BackendError, ProtocolError, RequestError
from transfer.listener import is_loopback
from transfer.pool_access import Bytes, PoolAccess
from transfer.strategies import Strategy

if TYPE_CHECKING:
    import jax

_NUMBER = struct.Struct("<Q")
_WINDOW_BYTES = 128 << 20
_IN_FLIGHT_BYTES = 32 << 20
_MAX_IN_FLIGHT = 64
_PIECE_BYTES = 8 << 20
"""Longest array. Memory of this size is used again by `malloc`; longer is mapped anew each time."""
_ALIGNMENT = 64
_LEFTOVER_S = 0.5
_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 20e-6, 1e-3
_STAGING_BYTES = 8 << 20
_NUM_SOCKETS = 2
"""Data connections of two servers. They must agree: where they do not, JAX aborts the process."""


class _Hello(msgspec.Struct, frozen=True, array_like=True):
    """Where a peer's transfer server listens."""

    address: str
    num_sockets: int


class JaxPullBackend(LinkBackend):
    """See the module's text.

    Args:
        config: the engine's.
        host: where the transfer server listens; the address by which peers reach this host.
        secret: the engine's. Without one, `host` must be loopback.
        device: where arrays are made; None for the first one of this process.

    Raises:
        RequestError: another address than loopback without a secret, or one that names no
            interface.
        BackendError: this JAX has no `jax.experimental.transfer`, or its server does not start.
    """

    name = "jax_pull"

    def __init__(
        self,
        config: TransferConfig,
        *,
        host: str = "127.0.0.1",
        secret: str | bytes = b"",
        device: jax.Device | None = None,
    ) -> None:
        if host in ("", "0.0.0.0", "::"):
            raise RequestError(f"{host=} names no interface; give the address peers connect to")
        if not secret and not is_loopback(host):
            raise RequestError(
                f"a transfer server on {host!r} without a secret would be open to anyone: give the "
                "engine's `secret`, or use 127.0.0.1"
            )
        self._lock = threading.Lock()
        self._connections: dict[str, Any] = {}
        self._device, self._server = _start(host, device)
        self._leftovers = _Leftovers(self._server, self._device)

    def hello(self) -> bytes | None:
        return msgspec.msgpack.encode(_Hello(self._server.address(), _NUM_SOCKETS))

    def why_not(self, peer: Peer) -> str:
        if self.name not in peer.hellos:
            return "the peer's engine has no such backend"
        there = _read_hello(peer).num_sockets
        return "" if there == _NUM_SOCKETS else f"{there} data sockets there, {_NUM_SOCKETS} here"

    def offer(self, source: PoolAccess, plan: Plan, peer: Peer) -> SendHalf:
        _check_grain(source, plan)
        return _PullSend(self._server, self._device, self._leftovers, source, plan)

    def receive(
        self, link: Link, destination: PoolAccess, plan: Plan, opening: bytes, peer: Peer
    ) -> int:
        _check_grain(destination, plan)
        connection = self._connection(peer)
        uuid = _read_number(opening)
        try:
            _Pulling(link, connection, self._device, destination, plan).run(uuid)
        except RuntimeError as error:
            # JAX's own: the peer's server has gone, or what it offers has another size.
            self.peer_lost(peer.engine_id)
            link.check()
            raise BackendError(f"cannot pull from {peer.engine_id}: {error}") from None
        return len(plan.calls)

    def peer_lost(self, engine_id: str) -> None:
        with self._lock:
            self._connections.pop(engine_id, None)

    def close(self) -> None:
        self._leftovers.close()
        with self._lock:
            self._connections.clear()

    def _connection(self, peer: Peer) -> Any:
        with self._lock:
            if peer.engine_id not in self._connections:
                if why := self.why_not(peer):
                    raise BackendError(f"cannot pull from {peer.engine_id}: {why}")
                address = _read_hello(peer).address
                self._connections[peer.engine_id] = self._server.connect(address)
            return self._connections[peer.engine_id]


class _PullSend(SendHalf):
    """The source's half: it offers copies, call by call, and hears which have arrived."""

    def __init__(
        self, server: Any, device: jax.Device, leftovers: _Leftovers, source: PoolAccess, plan: Plan
    ) -> None:
        self._server = server
        self._device = device
        self._leftovers = leftovers
        self._source = source
        self._plan = plan
        self._uuid = secrets.randbits(63)
        self._offered = self._done = 0
        self.opening = _NUMBER.pack(self._uuid)

    def run(self, link: Link) -> None:
        sizes = self._plan.calls[:, 2].tolist()
        held_bytes = 0
        while self._done < len(sizes):
            before = self._offered
            while self._offered < len(sizes) and (
                not held_bytes or held_bytes + sizes[self._offered] <= _WINDOW_BYTES
            ):
                link.check()
                # No name for the arrays: an error raised below would keep them alive.
                self._server.await_pull(_nth(self._uuid, self._offered), self._copy(self._offered))
                held_bytes += sizes[self._offered]
                self._offered += 1
            if self._offered > before:
                link.put(_NUMBER.pack(self._offered))
            done = _read_number(link.get())
            if not self._done <= done <= self._offered:
                raise ProtocolError(f"{done} calls done, of {self._offered} that were offered")
            held_bytes -= sum(sizes[self._done : done])
            self._done = done

    def close(self) -> None:
        left = range(self._done, self._offered)
        if left:
            sizes = [[size for _, _, size in _pieces(self._plan, i)] for i in left]
            uuids = [_nth(self._uuid, i) for i in left]
            self._leftovers.let_go(dict(zip(uuids, sizes, strict=True)))

    def _copy(self, call: int) -> list[jax.Array]:
        import jax

        pieces = _pieces(self._plan, call)
        block = self._plan.layout.bytes_per_block
        with self._source.open() as memory:
            if memory.flat is not None or not self._source.is_device_pool:
                parts = [_aligned(size) for _, _, size in pieces]
                for part, (offset, _, size) in zip(parts, pieces, strict=True):
                    if memory.flat is not None:
                        np.copyto(part, memory.flat[offset : offset + size])
                    else:
                        memory.read(offset // block, part)
                return [jax.device_put(part, self._device) for part in parts]
        taken = [self._source.take(offset // block, size // block) for offset, _, size in pieces]
        # One array, one buffer: the other side may be sharded in another way, or not at all.
        return [a if len(a.devices()) == 1 else jax.device_put(a, self._device) for a in taken]


class _Pulling:
    """The destination's half: a few pulls ahead of the one that is being written to the pool."""

    def __init__(
        self, link: Link, connection: Any, device: jax.Device, destination: PoolAccess, plan: Plan
    ) -> None:
        self._link = link
        self._connection = connection
        self._device = device
        self._destination = destination
        self._plan = plan
        self._told = self._done = 0
        with destination.open() as memory:
            self._as_bytes = memory.flat is not None or not destination.is_device_pool

    def run(self, first_uuid: int) -> None:
        sizes = self._plan.calls[:, 2].tolist()
        in_flight: deque[list[jax.Array]] = deque()
        offered = pulled = flying_bytes = 0
        while self._done < len(sizes):
            while (
                pulled < offered
                and len(in_flight) < _MAX_IN_FLIGHT
                and (not in_flight or flying_bytes + sizes[pulled] <= _IN_FLIGHT_BYTES)
            ):
                in_flight.append(self._pull(_nth(first_uuid, pulled), pulled))
                flying_bytes += sizes[pulled]
                pulled += 1
            if not in_flight:
                self._tell()
                offered = _read_number(self._link.get())
                if not pulled < offered <= len(sizes):
                    raise ProtocolError(f"{offered} calls offered, of {len(sizes)}")
                self._link.check()
                continue
            arrays = in_flight.popleft()
            self._write(self._done, arrays)
            flying_bytes -= sizes[self._done]
            self._done += 1
            if self._done - self._told >= _MAX_IN_FLIGHT:
                self._tell()
        self._tell()

    def _tell(self) -> None:
        if self._done > self._told:
            self._link.put(_NUMBER.pack(self._done))
            self._told = self._done

    def _pull(self, uuid: int, call: int) -> list[jax.Array]:
        layout = self._plan.layout
        specs = []
        for _, _, size in _pieces(self._plan, call):
            if self._as_bytes:
                specs.append(_spec((size,), np.uint8, self._device))
            else:
                shape = layout.pool_shape(size // layout.bytes_per_block)
                dtype = storage_dtype(layout.dtype, self._device.platform)
                specs.append(_spec(shape, np.dtype(dtype), self._device))
        pulled: list[jax.Array] = self._connection.pull(uuid, specs)
        return pulled

    def _write(self, call: int, arrays: Sequence[jax.Array]) -> None:
        """Each array as soon as it is there, while the next ones still come."""
        block = self._plan.layout.bytes_per_block
        for array, (_, offset, size) in zip(arrays, _pieces(self._plan, call), strict=True):
            _wait(array, self._link.check)
            if not self._as_bytes:
                self._destination.put(offset // block, array)
                continue
            with self._destination.open() as memory:
                if memory.flat is not None:
                    memory.flat[offset : offset + size] = np.asarray(array)
                else:
                    memory.write(offset // block, np.asarray(array))


class _Leftovers:
    """Lets go of arrays that were offered and that no peer will pull any more: pulls them itself.

    A pull of one that the peer had taken after all waits until something is offered under its
    uuid; it gets zeros.
    """

    def __init__(self, server: Any, device: jax.Device) -> None:
        self._server = server
        self._device = device
        self._lock = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None

    def let_go(self, sizes: dict[int, list[int]]) -> None:
        """Begin. `sizes`: bytes of the arrays by uuid. The peer pulls none of them from now on."""
        with self._lock:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "transfer-jax-pull")
            self._thread.submit(self._pull, sizes)

    def close(self) -> None:
        """Waits until everything is let go. Idempotent."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown()

    def _pull(self, sizes: dict[int, list[int]]) -> None:
        import jax

        connection = self._server.connect(self._server.address())
        waiting = {
            uuid: connection.pull(uuid, [_spec((n,), np.uint8, self._device) for n in sizes[uuid]])
            for uuid in sizes
        }
        ends_s = time.monotonic() + _LEFTOVER_S
        while waiting and time.monotonic() < ends_s:
            left = {uuid: arrays for uuid, arrays in waiting.items() if not _are_ready(arrays)}
            if len(left) < len(waiting):
                ends_s = time.monotonic() + _LEFTOVER_S
            waiting = left
            time.sleep(_LONGEST_SLEEP_S)
        for uuid in waiting:
            zeros = [jax.device_put(np.zeros(n, np.uint8), self._device) for n in sizes[uuid]]
            self._server.await_pull(uuid, zeros)


def _start(host: str, device: jax.Device | None) -> tuple[jax.Device, Any]:
    try:
        import jax
        import jax.experimental.transfer as transfer
    except (ImportError, AttributeError) as error:
        raise BackendError(
            f"the jax_pull backend needs jax.experimental.transfer, of jax 0.10.2 or newer: {error}"
        ) from None
    device = device or jax.local_devices()[0]
    name = f"[{host}]" if ":" in host else host
    try:
        server = transfer.start_transfer_server(
            device.client,
            f"{name}:0",
            [f"{name}:0"] * _NUM_SOCKETS,
            transfer_size=_STAGING_BYTES,
            use_raw_buffers=device.platform == "cpu",
        )
    except (RuntimeError, ValueError, TypeError) as error:
        raise BackendError(f"JAX's transfer server does not start on {host!r}: {error}") from None
    return device, server


def _read_hello(peer: Peer) -> _Hello:
    try:
        return msgspec.msgpack.decode(peer.hellos[JaxPullBackend.name], type=_Hello)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"where the peer's transfer server listens: {error}") from None


def _check_grain(access: PoolAccess, plan: Plan) -> None:
    with access.open() as memory:
        if memory.flat is None and plan.strategy is Strategy.LAYER_MAJOR:
            raise BackendError(
                "a sharded or device pool moves whole blocks only; use the block-major or "
                "aligned-runs strategy"
            )


def _pieces(plan: Plan, call: int) -> list[tuple[int, int, int]]:
    """(offset in the source pool, in the destination pool, size) of a call's arrays, in bytes."""
    src, dst, size = plan.calls[call].tolist()
    if plan.strategy is Strategy.LAYER_MAJOR:
        return [(src, dst, size)]
    block = plan.layout.bytes_per_block
    largest = 1 << max(0, (_PIECE_BYTES // block).bit_length() - 1)
    pieces, done = [], 0
    while done < size:
        piece = block * min(largest, 1 << ((size - done) // block).bit_length() - 1)
        pieces.append((src + done, dst + done, piece))
        done += piece
    return pieces


def _wait(array: Any, check: Callable[[], None]) -> None:
    """Wait for a pulled array, and raise what `check` raises. JAX's own wait cannot be ended."""
    sleep_s = _SHORTEST_SLEEP_S
    while not array.is_ready():
        check()
        time.sleep(sleep_s)
        sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)


def _are_ready(arrays: Sequence[Any]) -> bool:
    return all(array.is_ready() for array in arrays)


def _spec(shape: Sequence[int], dtype: npt.DTypeLike, device: jax.Device) -> Any:
    import jax
    from jax.sharding import SingleDeviceSharding

    make: Any = jax.ShapeDtypeStruct
    return make(tuple(shape), dtype, sharding=SingleDeviceSharding(device))


def _aligned(size: int) -> Bytes:
    """uint8 [size] that JAX takes on CPU as it is."""
    buffer = np.empty(size + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    return buffer[start : start + size]


def _nth(first_uuid: int, call: int) -> int:
    return (first_uuid + call) % (1 << 63)


def _read_number(body: bytes) -> int:
    if len(body) != _NUMBER.size:
        raise ProtocolError(f"{len(body)} bytes where a number of {_NUMBER.size} was due")
    number: int = _NUMBER.unpack(body)[0]
    return number
