"""Several pieces of one work at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence


def in_parallel(work: Sequence[Callable[[], None]], on_failure: Callable[[], None]) -> None:
    """Run everything, the first piece in this thread, and wait for all of it.

    Args:
        on_failure: called once when the first piece fails, to make the others end soon.

    Raises:
        The first piece's error, once every piece has ended.
    """
    errors: list[Exception] = []
    lock = threading.Lock()

    def run(piece: Callable[[], None]) -> None:
        try:
            piece()
        except Exception as error:
            with lock:
                errors.append(error)
                first = len(errors) == 1
            if first:
                on_failure()

    threads = [
        threading.Thread(target=run, args=(piece,), name="transfer-parallel") for piece in work[1:]
    ]
    for thread in threads:
        thread.start()
    run(work[0])
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
