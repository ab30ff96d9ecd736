"""What this machine and this installation are, as plain JSON-ready values.

Read by `flowkv doctor` and written into every benchmark report. Only `device_facts` imports JAX.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

PACKAGES = (
    "flowkv-jax",
    "jax",
    "jaxlib",
    "flax",
    "numpy",
    "ml-dtypes",
    "gguf",
    "tokenizers",
    "grpcio",
    "protobuf",
    "msgspec",
)


def versions() -> dict[str, str | None]:
    """Python and the packages that matter; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def host_facts() -> dict[str, Any]:
    """Operating system, cores this process may use, memory, and how busy the machine is."""
    memory = psutil.virtual_memory()
    return {
        "platform": platform.platform(),
        "machine": platform.machine(),
        "python_executable": sys.executable,
        "cores": usable_cores(),
        "memory_total_bytes": memory.total,
        "memory_available_bytes": memory.available,
        "load_average": list(os.getloadavg()),
    }


def usable_cores() -> int:
    """Cores this process may run on, fewer than the machine's under an affinity mask."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def device_facts() -> dict[str, Any]:
    """JAX's default backend and its devices. Imports JAX and starts the backend."""
    import jax

    return {
        "platform": jax.default_backend(),
        "devices": [
            {
                "id": device.id,
                "kind": device.device_kind,
                "memory_bytes": (device.memory_stats() or {}).get("bytes_limit"),
            }
            for device in jax.local_devices()
        ],
    }


def source_commit() -> str | None:
    """Commit of the checkout this package runs from, with "-dirty"; None outside a checkout."""
    folder = Path(__file__).resolve().parents[1]
    if not (folder / ".git").exists():
        return None
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() or None
