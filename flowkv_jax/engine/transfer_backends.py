"""The transfer backends of a process that has devices."""

from __future__ import annotations

from transfer.backends.base import LinkBackend
from transfer.backends.defaults import default_backends
from transfer.config import TransferConfig


def transfer_backends(config: TransferConfig, named: str | None) -> list[LinkBackend]:
    """Those that need nothing but this machine, and the one that is asked for by name.

    Raises:
        ImportError: NIXL is asked for and not installed (the extra `nixl`).
    """
    backends = default_backends(config)
    if named == "jax_pull":
        from transfer.backends.jax_pull import JaxPullBackend

        backends.append(JaxPullBackend(config))
    elif named == "nixl":
        from transfer.backends.nixl import NixlBackend

        backends.append(NixlBackend(config))
    return backends
