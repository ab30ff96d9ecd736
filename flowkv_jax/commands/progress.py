"""Signs of life on standard error: shown to a terminal, silent to a file or a pipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

PullProgress = Callable[[int, "int | None", str], None]


@contextmanager
def spinner(stream: TextIO, message: str, *, enabled: bool = True) -> Iterator[None]:
    """Show `message` with a spinner until the block ends; leaves no trace."""
    if not (enabled and stream.isatty()):
        yield
        return
    from rich.console import Console

    with Console(file=stream).status(message):
        yield


@contextmanager
def pull_bar(stream: TextIO, name: str, *, enabled: bool = True) -> Iterator[PullProgress]:
    """Give a callback for `hub.pull(name, progress=...)`: bars on a terminal, else plain lines."""
    if not enabled:
        yield lambda done_bytes, total_bytes, what: None
    elif stream.isatty():
        with _bar(stream, name) as report:
            yield report
    else:
        yield _line_reporter(stream, name)


def _line_reporter(stream: TextIO, name: str) -> PullProgress:
    announced: set[str] = set()

    def report(done_bytes: int, total_bytes: int | None, what: str) -> None:
        if what not in announced:
            announced.add(what)
            print(f"{what} {name}", file=stream, flush=True)

    return report


@contextmanager
def _bar(stream: TextIO, name: str) -> Iterator[PullProgress]:
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(file=stream), transient=True) as bars:
        tasks: dict[str, progress.TaskID] = {}

        def report(done_bytes: int, total_bytes: int | None, what: str) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(f"{what} {name}", total=total_bytes)
            bars.update(tasks[what], completed=done_bytes, total=total_bytes)

        yield report
