"""Outputs of one `generate` call, as they come or gathered."""

from __future__ import annotations

import queue
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

from flowkv_jax.cluster.submission import OutputSink, Submission
from flowkv_jax.outputs import RequestOutput


class OutputStream(Iterator[RequestOutput]):
    """Outputs of one `generate` call as they come. Closing it aborts what still runs.

    Also a context manager; it closes itself when it is collected.

    Args:
        withdraw: ends requests that still run.
    """

    def __init__(self, withdraw: Callable[[Sequence[Submission]], object]) -> None:
        self._inbox: queue.SimpleQueue[tuple[int, RequestOutput | Exception]] = queue.SimpleQueue()
        self._withdraw = withdraw
        self._running: dict[int, Submission] = {}

    def sink(self, index: int) -> OutputSink:
        """Where request `index` of the call sends its outputs."""
        # It must not hold on to the stream: the engine holds on to the sink while the request runs,
        # and a stream that its caller has dropped is to close itself.
        inbox = self._inbox
        return lambda item: inbox.put((index, item))

    def watch(self, index: int, submission: Submission) -> None:
        """Count a request among those that run, or will."""
        self._running[index] = submission

    def start(self, submit: Callable[[Submission], Future[None]]) -> None:
        """Submit every watched request; if one is refused, or the caller interrupts, none runs on.

        Raises:
            What `submit` fails with, for the first request that is refused.
        """
        try:
            for accepted in [submit(one) for one in self._running.values()]:
                accepted.result()
        except BaseException:
            self.close()
            raise

    def gather(self, *, show_progress: bool) -> list[RequestOutput]:
        """The last output of every request, in the order of the call."""
        outputs: dict[int, RequestOutput] = {}
        with self, _progress_bar(len(self._running) if show_progress else 0) as advance:
            while self._running:
                index, output = self._receive()
                outputs[index] = output
                advance(output.finished)
        return [outputs[index] for index in sorted(outputs)]

    def close(self) -> None:
        """Abort what still runs. Idempotent."""
        running, self._running = self._running, {}
        if running:
            self._withdraw(list(running.values()))

    def __next__(self) -> RequestOutput:
        if not self._running:
            raise StopIteration
        return self._receive()[1]

    def __enter__(self) -> OutputStream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_exiting():  # the engine has ended by then, and names are gone
            self.close()

    def _receive(self) -> tuple[int, RequestOutput]:
        index, item = self._inbox.get()
        if isinstance(item, Exception):
            del self._running[index]
            self.close()
            raise item
        if item.finished:
            del self._running[index]
        return index, item


@contextmanager
def _progress_bar(total: int) -> Iterator[Callable[[bool], None]]:
    """Counts finished requests on stderr; does nothing for a total of 0."""
    if not total:
        yield lambda is_finished: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("requests", total=total)
        yield lambda is_finished: bar.advance(task, int(is_finished))
