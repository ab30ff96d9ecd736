"""Which machine this is."""

from __future__ import annotations

import functools
import uuid
from pathlib import Path


@functools.cache
def host_id() -> str:
    """Equal for processes under one running kernel, containers included; new after a reboot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return f"node-{uuid.getnode():012x}"
