"""`ChatOpenAI` of langchain-openai."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

from checklist import require, require_equal, run_checks, surroundings
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

QUESTION = [
    SystemMessage("You answer in one sentence."),
    HumanMessage("What is the capital of France?"),
]


class Mood(BaseModel):
    """The mood of a text."""

    mood: Literal["good", "bad"]
    strength: Literal[1, 2, 3]


# A small model at temperature 0 may write digits without end where none stops it.
Digit = Annotated[int, Field(ge=0, le=9)]


@tool
def multiply(first: Digit, second: Digit) -> int:
    """Multiply two whole numbers."""
    return first * second


def _chat(**settings: object) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=f"{surroundings.http}/v1",
        api_key="none",
        model=surroundings.model,
        **{"temperature": 0, "max_tokens": 60, "max_retries": 0, **settings},
    )


def check_invoke() -> None:
    answer = _chat().invoke(QUESTION)
    require("Paris" in answer.content, f"answer: {answer.content!r}")
    require(answer.usage_metadata["output_tokens"] > 1, f"usage: {answer.usage_metadata}")
    require_equal(answer.response_metadata["finish_reason"], "stop", "finish_reason")


def check_stream() -> None:
    pieces = list(_chat(stream_usage=True).stream(QUESTION))
    require(len(pieces) > 3, f"{len(pieces)} pieces")
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    require_equal(whole.content, _chat().invoke(QUESTION).content, "the streamed text")
    require(whole.usage_metadata["output_tokens"] > 1, f"usage: {whole.usage_metadata}")


def check_batch_and_async() -> None:
    answers = _chat().batch([QUESTION] * 4)
    require_equal(len({answer.content for answer in answers}), 1, "answers to one question")
    answer = asyncio.run(_chat().ainvoke(QUESTION))
    require(answer.content, "no answer to ainvoke")


def check_structured_output() -> None:
    for method in ("json_schema", "function_calling"):
        structured = _chat(max_tokens=100).with_structured_output(Mood, method=method)
        mood = structured.invoke("The film was wonderful. Mood and strength?")
        require(isinstance(mood, Mood), f"{method}: {mood!r}")


def check_tools() -> None:
    bound = _chat(max_tokens=100).bind_tools([multiply], tool_choice="multiply", strict=True)
    answer = bound.invoke("What is 6 times 7?")
    require(answer.tool_calls, f"no call, but {answer!r:.500}")
    call = answer.tool_calls[0]
    require_equal(call["name"], "multiply", "the called tool")
    product = multiply.invoke(call["args"])
    turns = [
        HumanMessage("What is 6 times 7?"),
        AIMessage("", tool_calls=[call]),
        ToolMessage(str(product), tool_call_id=call["id"]),
    ]
    require(_chat().bind_tools([multiply]).invoke(turns), "no answer after the tool's result")


def check_completions() -> None:
    plain = OpenAI(
        base_url=f"{surroundings.http}/v1",
        api_key="none",
        model=surroundings.model,
        temperature=0,
        max_tokens=8,
    )
    require("Paris" in plain.invoke("The capital of France is"), "no Paris")
    require_equal(len(plain.batch(["a", "b"])), 2, "answers to two prompts")


if __name__ == "__main__":
    run_checks(__name__)
