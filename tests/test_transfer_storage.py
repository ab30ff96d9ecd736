"""The storage backend: whole files only, checksums always, orphans deleted, a full disk named."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.transfer_peer import assert_moved, filled_pool, peer_process, request
from transfer.backends import storage
from transfer.backends.storage import StorageBackend
from transfer.config import TransferConfig
from transfer.engine import TransferEngine
from transfer.errors import BackendError, ChecksumMismatch, NoPath, StorageFull, TransferError
from transfer.handle import TransferReport
from transfer.pool_access import NumpyPool


class Ends:
    def __init__(self, stack: ExitStack, here: Path, there: Path) -> None:
        self.a, self.b = filled_pool(64, 1), filled_pool(64, 2)
        self.source = self._engine(stack, "a", self.a, here)
        self.destination = self._engine(stack, "b", self.b, there)
        self.source.connect(self.destination.listen())

    def _engine(self, stack: ExitStack, node: str, pool: NumpyPool, folder: Path) -> TransferEngine:
        config = TransferConfig(storage_dir=folder, inline_bytes=0)
        engine = stack.enter_context(TransferEngine(config))
        engine.register_pool(node, pool)
        return engine

    def move(self) -> TransferReport:
        return self.source.submit(request([(3, 9, 40)]), backend="storage").wait(10)


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    with ExitStack() as stack:
        yield Ends(stack, tmp_path, tmp_path)


def left(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.suffix in (".kv", ".part")]


def test_a_file_is_whole_before_it_has_its_name(
    ends: Ends, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    rename = os.rename

    def renamed(old: Path, new: Path) -> None:
        seen.append((left(tmp_path), old.stat().st_size, new.suffix))
        rename(old, new)

    monkeypatch.setattr(os, "rename", renamed)
    ends.move()
    assert_moved(ends.a, ends.b, request([(3, 9, 40)]))
    [(names, size, suffix)] = seen
    assert [Path(name).suffix for name in names] == [".part"] and suffix == ".kv"
    assert size == 40 * ends.a.layout.bytes_per_block
    assert left(tmp_path) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk(
    ends: Ends, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageFull, match="cannot write 81920 bytes to the shared folder"):
        ends.move()
    assert left(tmp_path) == []
    assert ends.source.pinned("a", list(range(64))) == []
    assert ends.destination.pinned("b", list(range(64))) == []


@pytest.mark.parametrize(
    ("damage", "error", "text"),
    [
        (lambda path: path.unlink(), BackendError, "No such file"),
        (lambda path: os.truncate(path, 100), BackendError, "has 100 bytes, not 81920"),
        (lambda path: path.write_bytes(bytes(81920)), ChecksumMismatch, "bytes that arrived"),
    ],
    ids=["gone", "short", "changed"],
)
def test_a_file_system_that_loses_or_changes_it(
    ends: Ends, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage, error, text: str
) -> None:  # type: ignore[no-untyped-def]
    read = storage._read_file

    def damaged(path: Path, *rest) -> None:  # type: ignore[no-untyped-def]
        damage(path)
        read(path, *rest)

    monkeypatch.setattr(storage, "_read_file", damaged)
    with pytest.raises(error, match=text):
        ends.move()
    assert left(tmp_path) == []


@pytest.mark.parametrize("name", ["../outside.kv", "/etc/passwd", "x.part"])
def test_names_stay_in_the_folder(ends: Ends, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    make = storage._File
    monkeypatch.setattr(storage, "_File", lambda _, size, checksum: make(name, size, checksum))
    with pytest.raises(TransferError, match="is no name of a file in the shared folder"):
        ends.move()


def test_orphans_are_deleted_at_the_start_once_their_lease_is_over(tmp_path: Path) -> None:
    config = TransferConfig(storage_dir=tmp_path / "new", storage_lease_s=100)
    StorageBackend(config)
    for name, age_s in (("old.kv", 101), ("old.part", 500), ("young.kv", 10), ("other.txt", 900)):
        path = tmp_path / "new" / name
        path.write_bytes(b"x")
        os.utime(path, (1_000_000 - age_s, 1_000_000 - age_s))
    StorageBackend(config, now=lambda: 1_000_000)
    names = {path.name for path in (tmp_path / "new").iterdir()}
    assert names == {"young.kv", "other.txt", "transfer-folder-id"}


def test_a_killed_source_leaves_an_orphan_for_the_next_start(tmp_path: Path) -> None:
    with peer_process(storage_dir=str(tmp_path)) as peer:
        (tmp_path / "x-1.0.part").write_bytes(b"half")
        peer.kill()
    StorageBackend(TransferConfig(storage_dir=tmp_path, storage_lease_s=1e-6))
    assert left(tmp_path) == []


def test_folders_must_be_the_same(tmp_path: Path) -> None:
    with ExitStack() as stack:
        ends = Ends(stack, tmp_path / "one", tmp_path / "two")
        with pytest.raises(NoPath, match="the peer's folder is another one"):
            ends.move()
    with pytest.raises(ValueError, match="storage_dir is not set"):
        StorageBackend(TransferConfig())
