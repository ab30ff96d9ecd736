"""Threads that must not wait for a core on which something else computes. Imports no JAX.

A thread that wakes on a core that is kept busy by another waits for that one's turn to end: 3 ms
and more, where what it has to do takes a tenth of one. A hand-off is a chain of such wake-ups.
Real-time threads run at once. The system must permit it: CAP_SYS_NICE or RLIMIT_RTPRIO.
"""

from __future__ import annotations

import os

_PRIORITY = 1


def make_urgent() -> str:
    """Let the calling thread run before all ordinary ones; threads that it starts are ordinary.

    Returns why the system does not permit it; empty if it does.
    """
    if not hasattr(os, "sched_setscheduler"):
        return "this system has no real-time scheduling"
    try:
        policy = os.SCHED_FIFO | os.SCHED_RESET_ON_FORK
        os.sched_setscheduler(0, policy, os.sched_param(_PRIORITY))
    except OSError as error:
        return f"{error.strerror}: it takes CAP_SYS_NICE or RLIMIT_RTPRIO"
    return ""
