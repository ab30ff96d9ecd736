"""Reading another process's memory: `process_vm_readv` of Linux. Imports no JAX.

One copy, made by the kernel, straight from the source's pool to the destination's. The kernel
allows it between processes of one user, unless Yama or a container's profile forbids it; whoever
uses it probes first.
"""

from __future__ import annotations

import ctypes
import errno
import os

import numpy as np
import numpy.typing as npt

from transfer.errors import BackendError, PeerLost

Vectors = npt.NDArray[np.int64]
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
    wanted = int(here[:, 1].sum())
    read_vectors(pid, there.ctypes.data, here.ctypes.data, len(there), wanted)


def read_vectors(pid: int, there: int, here: int, count: int, wanted: int) -> None:
    """`read_memory`, given the addresses of the two tables and the bytes they add up to."""
    if _READ is None:
        raise BackendError("this system has no process_vm_readv")
    got = _READ(pid, here, count, there, count, 0)
    if got == wanted:
        return
    code = ctypes.get_errno() if got < 0 else errno.EFAULT
    if code == errno.ESRCH:
        raise PeerLost(f"process {pid} has ended")
    raise BackendError(f"cannot read the memory of process {pid}: {os.strerror(code)}")


def read_bytes(pid: int, address: int, count: int) -> bytes:
    """A few bytes of another process; raises like `read_memory`."""
    buffer = np.empty(count, np.uint8)
    there = np.array([[address, count]], np.int64)
    read_memory(pid, there, np.array([[buffer.ctypes.data, count]], np.int64))
    return buffer.tobytes()
