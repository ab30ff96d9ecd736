"""Which processes count as on one host."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from benchmarks.namespaces import NamespacesUnavailable, namespace_hosts
from transfer.host import host_id

PROGRAM = (sys.executable, "-c", "from transfer.host import host_id; print(host_id())")


@pytest.fixture(autouse=True)
def not_remembered() -> Iterator[None]:
    host_id.cache_clear()
    yield
    host_id.cache_clear()


def printed(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_a_child_process_is_on_the_same_host() -> None:
    assert printed(*PROGRAM) == host_id()


@pytest.mark.parametrize("kind", ["net", "pid"])
def test_another_namespace_is_another_host(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here = host_id()
    host_id.cache_clear()
    readlink = os.readlink
    monkeypatch.setattr(
        os, "readlink", lambda path: "other:[1]" if path.endswith(kind) else readlink(path)
    )
    assert host_id() != here


def test_network_namespaces_of_one_machine() -> None:
    try:
        with namespace_hosts() as hosts:
            ids = {printed(*host.command, *PROGRAM) for host in (hosts.source, hosts.destination)}
    except NamespacesUnavailable:
        return
    assert len(ids | {host_id()}) == 3


def test_where_the_system_has_no_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "readlink", refuse)
    assert host_id().endswith("/net/pid")
