"""One NIXL agent: what it has registered, the peers it knows, and its READs. Imports no JAX.

NIXL is not made for several threads at once, so one lock is held around every call. None of them
waits for a peer.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from transfer.backends.base import Peer
from transfer.errors import BackendError, ProtocolError
from transfer.pool_access import Bytes, PoolAccess

Descriptors = npt.NDArray[np.uint64]
"""[N, 3]: address, bytes, device (0 for host memory)."""

_MODULES = ("nixl", "nixl_cu13", "nixl_cu12")
_TOKEN_BYTES = 16
_NUM_TOKENS = 4096
_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 20e-6, 1e-3


class Lease:
    """16 random bytes in registered memory, until `end`."""

    def __init__(self, slots: _Slots) -> None:
        self.token = os.urandom(_TOKEN_BYTES)
        self._slots = slots
        self._slot = slots.take()
        self.address = slots.address(self._slot)
        slots.view(self._slot)[:] = np.frombuffer(self.token, np.uint8)

    def holds(self, token: bytes) -> bool:
        return self._slots.view(self._slot).tobytes() == token

    def end(self) -> None:
        self._slots.view(self._slot)[:] = 0
        self._slots.give_back(self._slot)


class _Slots:
    """Registered memory, handed out 16 bytes at a time."""

    def __init__(self) -> None:
        self.memory = np.zeros(_NUM_TOKENS * _TOKEN_BYTES, np.uint8)
        self._lock = threading.Lock()
        self._free = list(range(_NUM_TOKENS))

    def take(self) -> int:
        with self._lock:
            if not self._free:
                raise BackendError(f"more than {_NUM_TOKENS} legs at once")
            return self._free.pop()

    def give_back(self, slot: int) -> None:
        with self._lock:
            self._free.append(slot)

    def address(self, slot: int) -> int:
        return int(self.memory.ctypes.data) + slot * _TOKEN_BYTES

    def view(self, slot: int) -> Bytes:
        return self.memory[slot * _TOKEN_BYTES : (slot + 1) * _TOKEN_BYTES]


@dataclass(slots=True)
class _Registration:
    """A pool's memory, where it was when it was registered."""

    address: int
    size: int
    handle: Any
    metadata: bytes


@dataclass(slots=True)
class _Known:
    """What NIXL was told of a peer's memory. Forgotten once it is lost and no READ is left."""

    name: str = ""
    metadata: set[bytes] = field(default_factory=set)
    num_users: int = 0
    is_lost: bool = False


class NixlAgent:
    """See the module's text.

    Args:
        plugin: NIXL's backend, such as "UCX".

    Raises:
        BackendError: NIXL is not installed, or does not start.
    """

    def __init__(self, plugin: str) -> None:
        api = _import_api()
        self.name = f"flowkv-{uuid.uuid4().hex}"
        self._plugin = plugin
        self._lock = threading.Lock()
        self._pools: dict[PoolAccess, _Registration] = {}
        self._known: dict[str, _Known] = {}
        self._slots = _Slots()
        try:
            self._agent: Any = api.nixl_agent(self.name, api.nixl_agent_config(backends=[plugin]))
            self._slots_handle = self._agent.register_memory([_region(self._slots.memory)], "DRAM")
        except Exception as error:
            raise BackendError(f"NIXL does not start with {plugin}: {error!r}") from None

    def register(self, pool: PoolAccess, flat: Bytes) -> bytes:
        """Register a pool's memory, unless it is; returns the metadata that peers need."""
        with self._lock:
            address = int(flat.ctypes.data)
            known = self._pools.get(pool)
            if known is not None and (known.address, known.size) == (address, flat.size):
                return known.metadata
            if known is not None:
                # The pool has moved; that waits for every transfer, so nobody reads the old place.
                del self._pools[pool]
                self._agent.deregister_memory(known.handle)
            regions = [_region(flat), _region(self._slots.memory)]
            handle = self._agent.register_memory(regions[:1], "DRAM")
            shown = self._agent.get_reg_descs(regions, "DRAM")
            metadata = self._agent.get_partial_agent_metadata(shown, True, [self._plugin])
            self._pools[pool] = _Registration(address, flat.size, handle, metadata)
            return bytes(metadata)

    def lease(self) -> Lease:
        return Lease(self._slots)

    @contextmanager
    def remote(self, peer: Peer, metadata: bytes) -> Iterator[Remote]:
        """The peer, ready to be read, and not forgotten meanwhile."""
        with self._lock:
            known = self._known.setdefault(peer.engine_id, _Known())
            known.num_users += 1
            known.is_lost = False
        try:
            with self._lock:
                self._load(known, peer, metadata)
            yield Remote(self, known.name)
        finally:
            with self._lock:
                known.num_users -= 1
                self._forget_if_unused(peer.engine_id, known)

    def read(self, name: str, there: Descriptors, here: Descriptors) -> None:
        """Read from a peer's memory into ours; nothing is written any more once it has ended.

        Raises:
            BackendError: the peer is gone, or its memory cannot be read.
        """
        with self._lock:
            local = self._agent.get_xfer_descs(here, "DRAM")
            remote = self._agent.get_xfer_descs(there, "DRAM")
            handle = self._agent.initialize_xfer("READ", local, remote, name)
        sleep_s = 0.0
        try:
            with self._lock:
                state = self._agent.transfer(handle)
            while state == "PROC":
                time.sleep(sleep_s)
                sleep_s = min(max(2 * sleep_s, _SHORTEST_SLEEP_S), _LONGEST_SLEEP_S)
                with self._lock:
                    state = self._agent.check_xfer_state(handle)
        except Exception as error:
            raise BackendError(f"NIXL cannot read from the peer: {error!r}") from None
        finally:
            with self._lock:
                self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise BackendError("NIXL cannot read from the peer")

    def forget(self, engine_id: str) -> None:
        """The peer is lost. Idempotent."""
        with self._lock:
            known = self._known.get(engine_id)
            if known is not None:
                known.is_lost = True
                self._forget_if_unused(engine_id, known)

    def close(self) -> None:
        """Deregister everything. No READ is in flight. Idempotent."""
        with self._lock:
            agent, self._agent = self._agent, None
            if agent is None:
                return
            for known in self._known.values():
                if known.name:
                    agent.remove_remote_agent(known.name)
            self._known.clear()
            for pool in self._pools.values():
                agent.deregister_memory(pool.handle)
            self._pools.clear()
            agent.deregister_memory(self._slots_handle)

    def _load(self, known: _Known, peer: Peer, metadata: bytes) -> None:
        if metadata in known.metadata:
            return
        expected = peer.hellos["nixl"].decode()
        try:
            name = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise ProtocolError(f"NIXL does not take the peer's metadata: {error!r}") from None
        known.name = name.decode() if isinstance(name, bytes) else str(name)
        if known.name != expected:
            raise ProtocolError(f"metadata of agent {known.name!r} from {expected!r}")
        known.metadata.add(metadata)

    def _forget_if_unused(self, engine_id: str, known: _Known) -> None:
        # NIXL stops telling how a READ of a removed agent goes.
        if known.is_lost and not known.num_users and self._known.get(engine_id) is known:
            del self._known[engine_id]
            if known.name and self._agent is not None:
                self._agent.remove_remote_agent(known.name)


class Remote:
    """A peer whose memory can be read."""

    def __init__(self, agent: NixlAgent, name: str) -> None:
        self._agent = agent
        self._name = name

    def read(self, there: Descriptors, here: Descriptors) -> None:
        self._agent.read(self._name, there, here)

    def still_shows(self, address: int, token: bytes) -> bool:
        """Whether `token` is at `address` there."""
        landing = self._agent.lease()
        try:
            there = np.array([[address, _TOKEN_BYTES, 0]], np.uint64)
            here = np.array([[landing.address, _TOKEN_BYTES, 0]], np.uint64)
            self.read(there, here)
            return landing.holds(token)
        finally:
            landing.end()


def _region(memory: Bytes) -> tuple[int, int, int, str]:
    return (int(memory.ctypes.data), memory.size, 0, "")


def _import_api() -> Any:
    failures = []
    for name in _MODULES:
        try:
            api = importlib.import_module(f"{name}._api")
        except ImportError as error:
            failures.append(error)
            continue
        if "NIXL_LOG_LEVEL" not in os.environ:
            # It tells standard output what it does, which belongs to somebody else.
            logging.getLogger("nixl").setLevel(logging.WARNING)
        return api
    missing = [error for error in failures if (error.name or "").split(".")[0] not in _MODULES]
    why = f" ({missing[0]})" if missing else ""
    raise BackendError(
        f"the nixl backend needs NIXL{why}: pip install 'flowkv-jax[nixl]' (it needs torch too)"
    )
