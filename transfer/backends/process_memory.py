"""Reading another process's memory: `process_vm_readv` of Linux. Imports no JAX.

One copy, made by the kernel, straight from the source's pool to the destination's. The kernel
allows it between processes of one user, unless Yama or a container's profile forbids it; whoever
uses it probes first.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from transfer.errors import BackendError, PeerLost

Vectors = npt.NDArray[np.uint64]
"""[N, 2]: address and length of each piece: the C structure `iovec`."""

MAX_VECTORS = 1024
"""Pieces of one call (IOV_MAX)."""

_READ = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
if _READ is not None:
    _READ.restype = ctypes.c_ssize_t
    _READ.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    ]


def read_memory(pid: int, there: Vectors, here: Vectors) -> None:
    """Read the pieces `there`, of process `pid`, into the pieces `here`.

    Raises:
        PeerLost: the process has ended.
        BackendError: not allowed, not possible on this system, or not mapped there.
    """
    if _READ is None:
        raise BackendError("this system has no process_vm_readv")
    count = len(there)
    wanted = int(here[:, 1].sum())
    got = _READ(pid, here.ctypes.data, count, there.ctypes.data, count, 0)
    if got == wanted:
        return
    code = ctypes.get_errno() if got < 0 else errno.EFAULT
    if code == errno.ESRCH:
        raise PeerLost(f"process {pid} has ended")
    raise BackendError(f"cannot read the memory of process {pid}: {os.strerror(code)}")


def read_bytes(pid: int, address: int, count: int) -> bytes:
    """A few bytes of another process; raises like `read_memory`."""
    buffer = np.empty(count, np.uint8)
    there = np.array([[address, count]], np.uint64)
    read_memory(pid, there, np.array([[buffer.ctypes.data, count]], np.uint64))
    return buffer.tobytes()


def batches(there: Vectors, here: Vectors, max_bytes: int) -> Iterator[tuple[Vectors, Vectors]]:
    """The pieces in groups for single calls: at most `MAX_VECTORS` and about `max_bytes` each.

    Pieces longer than `max_bytes` are cut.
    """
    if int(here[:, 1].max()) > max_bytes:
        there, here = _cut(there, max_bytes), _cut(here, max_bytes)
    ends = np.cumsum(here[:, 1])
    start = 0
    while start < len(here):
        done = ends[start - 1] if start else np.uint64(0)
        stop = int(np.searchsorted(ends, done + np.uint64(max_bytes), "right"))
        stop = min(max(stop, start + 1), start + MAX_VECTORS)
        yield there[start:stop], here[start:stop]
        start = stop


def _cut(vectors: Vectors, max_bytes: int) -> Vectors:
    lengths = vectors[:, 1].astype(np.int64)
    pieces = -(-lengths // max_bytes)
    first = np.repeat(np.cumsum(pieces) - pieces, pieces)
    offsets = (np.arange(pieces.sum()) - first) * max_bytes
    cut = np.repeat(vectors, pieces, axis=0)
    cut[:, 0] += offsets.astype(np.uint64)
    cut[:, 1] = np.minimum(max_bytes, np.repeat(lengths, pieces) - offsets)
    return cut
