"""One mailbox for the outputs of several engine requests."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from flowkv_jax.errors import GenerationError, RequestCancelled, RetryableRequestError
from flowkv_jax.outputs import CompletionOutput, RequestOutput
from flowkv_jax.rpc.generation import Generation, merged
from flowkv_jax.rpc.live_requests import LiveRequests


def output(text: str, *, finished: bool = False) -> RequestOutput:
    delta = CompletionOutput(0, text, [1], delta_text=text, delta_token_ids=[1])
    return RequestOutput("r", None, [1, 2], [delta], finished)


class Answer:
    """An engine's iterator that yields what is put into it; an error is raised, None ends it."""

    def __init__(self, *items: Any) -> None:
        self.items: asyncio.Queue[Any] = asyncio.Queue()
        self.is_closed = False
        for item in items:
            self.items.put_nowait(item)

    async def outputs(self) -> AsyncIterator[RequestOutput]:
        try:
            while (item := await self.items.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.is_closed = True


def generation(answers: Sequence[Answer], live: LiveRequests, **settings: Any) -> Generation:
    return Generation(
        [answer.outputs() for answer in answers],
        live,
        **{"min_interval_s": 0.0, "is_whole": False, **settings},
    )


async def taken_of(one: Generation) -> list[tuple[int, str]]:
    texts: list[tuple[int, str]] = []
    while taken := await one.take():
        texts += [(index, item.outputs[0].delta_text) for index, item in taken]
    return texts


async def test_everything_in_order_and_then_nothing() -> None:
    live = LiveRequests()
    first = Answer(output("a"), output("b"), output("c", finished=True), None)
    second = Answer(output("d"), output("e", finished=True), None)
    async with generation([first, second], live) as one:
        assert len(live) == 1
        texts = await taken_of(one)
        assert await one.take() == []
    assert [text for index, text in texts if index == 0] == ["a", "b", "c"]
    assert [text for index, text in texts if index == 1] == ["d", "e"]
    assert len(live) == 0 and first.is_closed and second.is_closed


async def test_outputs_within_the_interval_are_taken_together() -> None:
    answer = Answer(output("a"))
    async with generation([answer], LiveRequests(), min_interval_s=60.0) as one:
        assert len(await one.take()) == 1
        for item in (output("b"), output("c"), output("d", finished=True), None):
            answer.items.put_nowait(item)
        assert len(await one.take()) == 3


async def test_an_interval_that_is_over_gives_what_came_meanwhile() -> None:
    answer = Answer(output("a"))
    async with generation([answer], LiveRequests(), min_interval_s=0.05) as one:
        await one.take()
        answer.items.put_nowait(output("b"))
        answer.items.put_nowait(output("c"))
        assert len(await one.take()) == 2


async def test_whole_answers_are_taken_at_the_end() -> None:
    answer = Answer(output("a"))
    async with generation([answer], LiveRequests(), is_whole=True) as one:
        take = asyncio.ensure_future(one.take())
        await asyncio.sleep(0.02)
        assert not take.done()
        answer.items.put_nowait(output("b", finished=True))
        answer.items.put_nowait(None)
        assert len(await take) == 2


@pytest.mark.parametrize("is_stopped", [True, False])
async def test_an_error_comes_behind_what_was_said_and_ends_all(is_stopped: bool) -> None:
    live = LiveRequests()
    answers = [Answer(output("a")), Answer()]
    error = RequestCancelled("stopped")
    with pytest.raises(RequestCancelled, match="stopped"):
        async with generation(answers, live) as one:
            first = await one.take()
            assert len(first) == 1
            if is_stopped:
                live.stop_all(error)
                live.stop_all(RequestCancelled("the first call wins"))
            else:
                answers[0].items.put_nowait(output("b"))
                answers[0].items.put_nowait(error)
                assert len(await one.take()) == 1
            await one.take()
    assert all(answer.is_closed for answer in answers)
    assert len(live) == 0


async def test_an_engine_that_ends_too_soon_is_an_error() -> None:
    with pytest.raises(GenerationError, match="before it was finished"):
        async with generation([Answer(output("a"), None)], LiveRequests()) as one:
            await taken_of(one)


async def test_nothing_begins_that_a_drain_would_not_wait_for() -> None:
    live = LiveRequests()
    one = generation([Answer(output("a"))], live)
    live.refuse_new()
    with pytest.raises(RetryableRequestError, match="shutting down"):
        async with one:
            raise AssertionError("it has begun")
    assert len(live) == 0


async def test_leaving_closes_the_iterators() -> None:
    live = LiveRequests()
    answers = [Answer(output("a")), Answer()]
    async with generation(answers, live) as one:
        await one.take()
    assert all(answer.is_closed for answer in answers)
    assert len(live) == 0


async def test_no_part_of_an_answer_that_failed_is_taken_for_the_whole() -> None:
    answers = [Answer(output("a"), GenerationError("broken")), Answer(output("b"))]
    async with generation(answers, LiveRequests(), is_whole=True) as one:
        with pytest.raises(GenerationError, match="broken"):
            await one.take_whole()


async def test_one_prompt_is_taken_as_one_output() -> None:
    answer = Answer(output("a"), output("b", finished=True), None)
    async with generation([answer], LiveRequests(), is_whole=True) as one:
        whole = await one.take_one()
        assert whole is not None and whole.finished
        assert whole.outputs[0].delta_text == "ab"
        assert await one.take_one() is None


def test_what_is_taken_together_is_merged_by_prompt() -> None:
    taken = [(1, output("a")), (0, output("b")), (1, output("c", finished=True))]
    assert [
        (index, item.outputs[0].delta_text, item.finished) for index, item in merged(taken)
    ] == [(0, "b", False), (1, "ac", True)]
