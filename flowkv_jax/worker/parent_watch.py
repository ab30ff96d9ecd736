"""Ends a worker whose launcher is gone. No JAX."""

from __future__ import annotations

import os
import sys
import threading

EXIT_ORPHANED = 3


def exit_with_parent() -> None:
    """Exit at once when standard input ends: the pipe that the launcher holds.

    A second way beside `bootstrap.die_with_parent`, for systems without that. The thread is a
    daemon, as nothing else can end its reading.
    """

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os._exit(EXIT_ORPHANED)

    threading.Thread(target=watch, name="flowkv-parent-watch", daemon=True).start()
