"""Inboxes that share a doorbell: nobody is forgotten, many are woken by one ring."""

import asyncio
import gc
import threading
import weakref

from flowkv_jax.cluster.turns import Turns
from flowkv_jax.engine.doorbell import Doorbell, Inbox


async def test_items_of_another_thread_come_in_order() -> None:
    inbox: Inbox[int] = Inbox(Doorbell(asyncio.get_running_loop()))

    def deliver() -> None:
        for number in range(1000):
            inbox.put(number)()

    thread = threading.Thread(target=deliver)
    thread.start()
    async with asyncio.timeout(20):
        assert [await inbox.get() for _ in range(1000)] == list(range(1000))
    thread.join()


async def test_one_ring_wakes_all() -> None:
    doorbell = Doorbell(asyncio.get_running_loop())
    inboxes: list[Inbox[int]] = [Inbox(doorbell) for _ in range(8)]
    readers = [asyncio.create_task(inbox.get()) for inbox in inboxes]
    await asyncio.sleep(0)
    rings = {inbox.put(number) for number, inbox in enumerate(inboxes)}
    assert len(rings) == 1
    rings.pop()()
    async with asyncio.timeout(20):
        assert await asyncio.gather(*readers) == list(range(8))


async def test_a_reader_that_gave_up_loses_nothing() -> None:
    inbox: Inbox[str] = Inbox(Doorbell(asyncio.get_running_loop()))
    reader = asyncio.create_task(inbox.get())
    await asyncio.sleep(0)
    reader.cancel()
    await asyncio.wait([reader])
    inbox.put("kept")()
    async with asyncio.timeout(20):
        assert await inbox.get() == "kept"


def test_a_loop_that_is_over_is_passed_over() -> None:
    loop = asyncio.new_event_loop()
    doorbell = Doorbell(loop)
    loop.close()
    doorbell.ring()
    gone = weakref.ref(loop)
    del loop
    gc.collect()
    assert gone() is None, "a doorbell does not keep its loop"
    doorbell.ring()


def test_turns_call_what_sinks_return_once_and_last() -> None:
    turns, seen = Turns(), []

    def ring() -> None:
        seen.append("ring")

    def sink(item: int):  # type: ignore[no-untyped-def]
        seen.append(item)
        return ring

    turns.take(lambda: [turns.call(sink, number) for number in range(3)])
    assert seen == [0, 1, 2, "ring"]
