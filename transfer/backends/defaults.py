"""The backends that an engine has unless it is told otherwise."""

from __future__ import annotations

from transfer.backends.base import LinkBackend
from transfer.backends.shared_memory import SharedMemoryBackend
from transfer.backends.storage import StorageBackend
from transfer.backends.tcp import TcpBackend
from transfer.config import TransferConfig


def default_backends(config: TransferConfig) -> list[LinkBackend]:
    """Those that need nothing but this machine, and its shared folder if there is one."""
    found: list[LinkBackend] = [SharedMemoryBackend(config), TcpBackend(config)]
    if config.storage_dir is not None:
        found.append(StorageBackend(config))
    return found
