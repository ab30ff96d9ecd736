"""Through a folder that both engines can write to: a shared file system between hosts.

    source                                        destination
    writes <leg>.<random>.part, fsync
    renames it to <leg>.<random>.kv, fsync folder
    note: name, size, checksum           ->       reads it into the pool, compares the checksum
                                                  of the bytes as they are in the pool, deletes it

A name is never used twice and a file only gets its final name when it is whole, so a reader never
sees half of one. The checksum is always made and always compared: a file system between two hosts
is one more thing that can hand out old or torn pages.

A source or destination that was killed leaves a file behind. Files older than the lease are
deleted when an engine starts; a transfer takes seconds, a lease an hour. A second engine with the
same folder announces the same folder id, which is how two engines know that it is shared.
"""

from __future__ import annotations

import errno
import os
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np

from transfer.backends.base import Link, LinkBackend, Peer, Plan, SendHalf
from transfer.checksum import check_same, plan_checksum
from transfer.config import TransferConfig
from transfer.errors import BackendError, ProtocolError, StorageFull
from transfer.pool_access import PoolAccess, incoming, outgoing

_ID_FILE = "transfer-folder-id"
_SUFFIXES = (".part", ".kv")
_PIECE_BYTES = 4 << 20
_NOTE_S = 600.0


class _File(msgspec.Struct, frozen=True, array_like=True):
    """What the source tells of a finished file."""

    name: str
    size: int
    checksum: int


_decoder = msgspec.msgpack.Decoder(_File)


class StorageBackend(LinkBackend):
    """See the module's text.

    Args:
        config: with `storage_dir`; the folder is made if it is missing.
        now: seconds since the epoch, as file times are.
    """

    name = "storage"

    def __init__(self, config: TransferConfig, now: Callable[[], float] = time.time) -> None:
        if config.storage_dir is None:
            raise ValueError("storage_dir is not set: the storage backend needs a shared folder")
        self._folder = config.storage_dir
        self._folder.mkdir(parents=True, exist_ok=True)
        self._folder_id = _folder_id(self._folder)
        self._delete_orphans(now() - config.storage_lease_s)

    def hello(self) -> bytes | None:
        return self._folder_id

    def why_not(self, peer: Peer) -> str:
        theirs = peer.hellos.get(self.name)
        if theirs is None:
            return "the peer has no shared folder"
        return "" if theirs == self._folder_id else "the peer's folder is another one"

    def offer(self, source: PoolAccess, plan: Plan, peer: Peer) -> SendHalf:
        return _StorageSend(self._folder, source, plan)

    def receive(
        self, link: Link, destination: PoolAccess, plan: Plan, opening: bytes, peer: Peer
    ) -> int:
        try:
            file = _decoder.decode(link.get(_NOTE_S))
        except msgspec.DecodeError as error:
            raise ProtocolError(f"a note that cannot be read: {error}") from None
        if file.size != plan.data_bytes:
            raise ProtocolError(f"a file of {file.size} bytes for {plan.data_bytes}")
        if Path(file.name).name != file.name or not file.name.endswith(".kv"):
            raise ProtocolError(f"{file.name!r} is no name of a file in the shared folder")
        path = self._folder / file.name
        try:
            _read_file(path, link, destination, plan)
        except OSError as error:
            raise BackendError(f"cannot read {file.name} in the shared folder: {error}") from None
        check_same(plan, file.checksum, plan_checksum(destination, plan, of_source=False))
        with suppress(OSError):
            path.unlink()
        return len(plan.calls)

    def _delete_orphans(self, before_s: float) -> None:
        for path in self._folder.iterdir():
            if path.suffix in _SUFFIXES:
                with suppress(OSError):
                    if path.stat().st_mtime < before_s:
                        path.unlink()


class _StorageSend(SendHalf):
    """The source's half: the one that deletes the file if the destination does not."""

    def __init__(self, folder: Path, source: PoolAccess, plan: Plan) -> None:
        stem = f"{plan.transfer}-{plan.leg}.{os.urandom(8).hex()}"
        self._part = folder / f"{stem}.part"
        self._path = folder / f"{stem}.kv"
        self._source = source
        self._plan = plan

    def run(self, link: Link) -> None:
        try:
            checksum = self._write(link)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            kind = StorageFull if full else BackendError
            raise kind(
                f"cannot write {self._plan.data_bytes} bytes to the shared folder: {error.strerror}"
            ) from None
        file = _File(self._path.name, self._plan.data_bytes, checksum)
        link.put(msgspec.msgpack.encode(file))

    def close(self) -> None:
        for path in (self._part, self._path):
            with suppress(OSError):
                path.unlink()

    def _write(self, link: Link) -> int:
        plan, value = self._plan, 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(self._part, flags, 0o600), "wb", buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, plan.data_bytes)
            with self._source.open() as memory:
                offsets, sizes = plan.calls[:, 0].tolist(), plan.calls[:, 2].tolist()
                block = plan.layout.bytes_per_block
                for piece in outgoing(memory, offsets, sizes, _PIECE_BYTES, block):
                    link.check()
                    value = zlib.crc32(piece.data, value)
                    _write_all(file.fileno(), piece.data)
            os.fsync(file.fileno())
        os.rename(self._part, self._path)
        _sync_folder(self._path.parent)
        return value


def _read_file(path: Path, link: Link, destination: PoolAccess, plan: Plan) -> None:
    block = plan.layout.bytes_per_block
    with open(path, "rb", buffering=0) as file, destination.open() as memory:
        size = os.fstat(file.fileno()).st_size
        if size != plan.data_bytes:
            raise BackendError(f"{path.name} has {size} bytes, not {plan.data_bytes}")
        offsets, sizes = plan.calls[:, 1].tolist(), plan.calls[:, 2].tolist()
        for buffer in incoming(memory, offsets, sizes, _PIECE_BYTES, block):
            link.check()
            view = memoryview(buffer.view(np.uint8).data)
            while view:
                count = file.readinto(view)
                if not count:
                    raise BackendError(f"{path.name} became shorter while it was read")
                view = view[count:]


def _write_all(descriptor: int, view: memoryview) -> None:
    while view:
        view = view[os.write(descriptor, view) :]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _folder_id(folder: Path) -> bytes:
    """Random bytes that everyone who uses the folder finds there; the first one writes them."""
    path = folder / _ID_FILE
    mine = folder / f"{_ID_FILE}.{os.urandom(8).hex()}"
    mine.write_bytes(os.urandom(16).hex().encode())
    try:
        with suppress(FileExistsError):
            # A link, unlike a rename, fails where another engine was first.
            os.link(mine, path)
    finally:
        mine.unlink()
    return path.read_bytes()
