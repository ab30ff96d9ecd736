"""What a launched process does before it becomes the worker. Run as a script; imports nothing of
this package.

    python bootstrap.py PARENT_PID CPUS COMMAND...

It asks the kernel to kill it when its parent dies, however that dies, and keeps to the given CPUs
(0,1,2; empty for all) before any library counts them. Doing this here and not between fork and exec
keeps the launcher free of code that runs in a copy of a process with many threads.
"""

from __future__ import annotations

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # prctl(2); what it sets outlives exec


def die_with_parent(parent_pid: int) -> None:
    """Be killed when the parent's thread that started this process ends (Linux). Exits if the
    parent is gone already."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit("the parent is gone")


def main(arguments: list[str]) -> None:
    """Never returns."""
    parent_pid, cpus, *command = arguments
    die_with_parent(int(parent_pid))
    if cpus and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, [int(cpu) for cpu in cpus.split(",")])
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main(sys.argv[1:])
