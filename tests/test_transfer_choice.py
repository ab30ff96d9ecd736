"""Which backend carries a leg, unless the caller names one."""

from __future__ import annotations

import pytest

from tests.transfer_backend_peer import LAYOUT, NUM_BLOCKS, make_request
from transfer.backends.base import Peer
from transfer.errors import NoPath
from transfer.pool_access import NumpyPool, PoolAccess
from transfer.route import Way, routes_for
from transfer.testing import ScriptedBackend

ALL = ["shared_memory", "nixl", "collective", "jax_pull", "tcp", "storage"]


class DevicePool(NumpyPool):
    @property
    def is_device_pool(self) -> bool:
        return True


def choices(
    *,
    same_host: bool = False,
    here: list[str] = ALL,
    there: list[str] = ALL,
    on_device: bool = True,
    named: str | None = None,
) -> list[str]:
    """Backends of the routes, best first."""
    kind = DevicePool if on_device else NumpyPool
    source: PoolAccess = kind(LAYOUT, NUM_BLOCKS)
    peer = Peer("there", same_host, dict.fromkeys(there, b""), None)
    way = Way(peer, {name: ScriptedBackend(name=name) for name in here}, source)
    routes = routes_for(make_request("a", "b", [(0, 0, 1)]), [], way, named)
    return [leg.backend for route in routes for leg in route.legs]


def test_on_one_host_shared_memory_comes_first() -> None:
    assert choices(same_host=True) == ["shared_memory", "nixl", "collective", "jax_pull", "tcp"]


def test_between_hosts_rdma_then_one_world_then_jax_pull_then_tcp() -> None:
    assert choices() == ["nixl", "collective", "jax_pull", "tcp"]
    assert choices(there=["collective", "jax_pull", "tcp"]) == ["collective", "jax_pull", "tcp"]
    assert choices(here=["jax_pull", "tcp"]) == ["jax_pull", "tcp"]


def test_pools_in_host_memory_need_no_jax_pull() -> None:
    assert choices(on_device=False, here=["jax_pull", "tcp"]) == ["tcp"]


def test_the_caller_may_name_one() -> None:
    assert choices(same_host=True, named="jax_pull") == ["jax_pull"]
    with pytest.raises(NoPath, match="nixl: the peer has no backend 'nixl'"):
        choices(there=["tcp"], named="nixl")
    with pytest.raises(NoPath, match="nixl: not set up here"):
        choices(here=["tcp"], named="nixl")


def test_nothing_in_common_says_why_for_each() -> None:
    with pytest.raises(NoPath) as caught:
        choices(here=["tcp", "nixl"], there=["collective"])
    for why in ("nixl: the peer has no", "collective: not set up here", "tcp: the peer has no"):
        assert why in str(caught.value)


def test_within_one_process_it_is_local() -> None:
    way = Way(None, {}, NumpyPool(LAYOUT, NUM_BLOCKS))
    routes = routes_for(make_request("a", "b", [(0, 0, 1)]), [], way, None)
    assert [leg.backend for route in routes for leg in route.legs] == ["local"]
    with pytest.raises(NoPath, match="both nodes are in this process"):
        routes_for(make_request("a", "b", [(0, 0, 1)]), [], way, "tcp")
