"""One request's outputs as an asynchronous iterator. No JAX."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, MutableMapping, Sequence
from concurrent.futures import Future

from flowkv_jax.cluster.submission import OutputSink, Submission
from flowkv_jax.engine.doorbell import Doorbell, Inbox
from flowkv_jax.outputs import RequestOutput


async def answer(
    prepare: Callable[[OutputSink], Submission],
    submit: Callable[[Submission], Future[None]],
    withdraw: Callable[[Sequence[Submission]], object],
    doorbells: MutableMapping[asyncio.AbstractEventLoop, Doorbell],
) -> AsyncIterator[RequestOutput]:
    """Submit a request at the first step of the iteration; closing the iterator withdraws it.

    Args:
        prepare: makes the request, with the sink that it is given; called off the event loop, as a
            long prompt takes milliseconds to tokenise.
        doorbells: one for each event loop, shared by all answers on it; made here where missing.

    Raises:
        What `prepare` raises, what `submit`'s future fails with, and what comes to the sink.
    """
    loop = asyncio.get_running_loop()
    inbox: Inbox[RequestOutput | Exception] = Inbox(doorbells.setdefault(loop, Doorbell(loop)))
    submission = await asyncio.to_thread(prepare, inbox.put)
    is_finished = False
    try:
        await asyncio.wrap_future(submit(submission))
        while not is_finished:
            item = await inbox.get()
            is_finished = isinstance(item, Exception) or item.finished
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        if not is_finished:
            withdraw([submission])
