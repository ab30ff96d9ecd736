"""Every error of the transfer middleware, as one tree. Imports no JAX.

    TransferError
    ├── RequestError                the caller can fix it (also a ValueError)
    │   ├── UnknownNode             no pool of that name here, or at any connected peer
    │   ├── PoolBoundsError         block ids outside a pool
    │   ├── BlocksBusy              destination blocks that another transfer writes
    │   ├── NoPath                  no backend can serve the request; says why for each
    │   └── StaleGeneration         a block was freed since the request was made
    ├── PeerError                   the other engine, or the way to it
    │   ├── AuthenticationFailed    wrong secret, or one side has none
    │   ├── HandshakeMismatch       version, layout, dtype or block size differ
    │   ├── ProtocolError           bytes that are not the protocol
    │   │   ├── FrameTooLarge       refused before anything was allocated
    │   │   └── TruncatedStream     ended in the middle of a frame
    │   └── PeerLost                closed, killed, or silent for too long
    ├── BackendError                a backend failed; another path may work
    │   ├── ChecksumMismatch        source and destination differ after the move
    │   └── StorageFull             no room in the shared folder
    ├── PoolMoved                   a pool's memory was replaced under a transfer
    ├── DeadlineExceeded            ran past its deadline (also a TimeoutError)
    ├── Cancelled                   by its caller
    └── EngineClosed                the engine is shut down

An error crosses a channel as its class name and its text. `can_retry` says whether another path
may succeed where this one failed.
"""

from __future__ import annotations


class TransferError(Exception):
    """Root of the tree."""

    can_retry = False


class RequestError(TransferError, ValueError):
    """The caller can fix it."""


class UnknownNode(RequestError):
    """No pool of that name is registered here, or at any connected peer."""


class PoolBoundsError(RequestError):
    """Block ids outside a pool."""


class BlocksBusy(RequestError):
    """Destination blocks that another transfer in flight writes."""


class NoPath(RequestError):
    """No backend can serve the request."""


class StaleGeneration(RequestError):
    """A block was freed, and perhaps given to someone else, since the request was made."""


class PeerError(TransferError):
    """The other engine, or the way to it."""


class AuthenticationFailed(PeerError):
    """The two sides do not share a secret."""


class HandshakeMismatch(PeerError):
    """Two engines, or two pools, that cannot exchange blocks."""


class ProtocolError(PeerError):
    """Bytes that are not the protocol."""


class FrameTooLarge(ProtocolError):
    """A frame announced more bytes than its reader takes."""


class TruncatedStream(ProtocolError):
    """The stream ended in the middle of a frame."""


class PeerLost(PeerError):
    """The connection ended, or nothing came over it for too long."""


class BackendError(TransferError):
    """A backend failed. Another path may work."""

    can_retry = True


class ChecksumMismatch(BackendError):
    """What the destination holds is not what the source held."""


class StorageFull(BackendError):
    """No room in the shared folder."""


class PoolMoved(TransferError):
    """A pool's memory was replaced under a transfer."""


class DeadlineExceeded(TransferError, TimeoutError):
    """The transfer ran past its deadline."""


class Cancelled(TransferError):
    """Cancelled by its caller."""


class EngineClosed(TransferError):
    """The engine is shut down."""


def _tree(root: type[TransferError]) -> dict[str, type[TransferError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


_BY_NAME = _tree(TransferError)


def to_wire(error: BaseException) -> tuple[str, str]:
    """(code, text) of any error; one outside the tree is a `BackendError`."""
    if isinstance(error, TransferError) and type(error).__name__ in _BY_NAME:
        return type(error).__name__, str(error)
    return BackendError.__name__, f"{type(error).__name__}: {error}"


def from_wire(code: str, text: str) -> TransferError:
    """The error that `to_wire` described; an unknown code is a `TransferError`."""
    return _BY_NAME.get(code, TransferError)(text)
