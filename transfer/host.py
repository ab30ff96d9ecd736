"""Which host this process is on, in the sense that counts for transfers.

Two processes are on the same host if what shared memory needs works between them: one reads the
other's memory by its process id, and they meet at a Unix socket. That takes the same running
kernel, the same process-id namespace and the same network namespace, so two containers on one
machine are two hosts, unless they were started to share both.
"""

from __future__ import annotations

import functools
import os
import uuid
from pathlib import Path

_NAMESPACES = ("net", "pid")


@functools.cache
def host_id() -> str:
    """Equal for processes on one host, in the sense above; new after a reboot."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        machine = f"node-{uuid.getnode():012x}"
    return "/".join([machine, *map(_namespace, _NAMESPACES)])


def _namespace(kind: str) -> str:
    """Such as "net:[4026531840]"; the kind alone where the system does not tell."""
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return kind
