"""The handlers, and their lines in the table of routes."""

from __future__ import annotations

from flowkv_jax.http.openai.chat import answer_chat
from flowkv_jax.http.openai.completions import answer_completion
from flowkv_jax.http.openai.fields import FieldJudge
from flowkv_jax.http.openai.requests import ChatCompletionRequest, CompletionRequest
from flowkv_jax.http.openai.responses import ChatCompletionResponse, CompletionResponse
from flowkv_jax.http.openai.tools.model_way import ModelWay
from flowkv_jax.http.request import Request
from flowkv_jax.http.response import Response
from flowkv_jax.http.route import Route
from flowkv_jax.http.surroundings import Surroundings

_STATUSES = (404, 409, 422, 429, 500, 503, 504)


def routes() -> list[Route]:
    judge, model_way = FieldJudge(), ModelWay()

    async def completions(request: Request, surroundings: Surroundings) -> Response | None:
        """Continue prompts."""
        asked = judge.read(await request.json_bytes(), CompletionRequest)
        return await answer_completion(request, surroundings, asked)

    async def chat_completions(request: Request, surroundings: Surroundings) -> Response | None:
        """Answer a conversation."""
        asked = judge.read(await request.json_bytes(), ChatCompletionRequest)
        return await answer_chat(request, surroundings, asked, model_way)

    return [
        Route(
            "POST",
            "/v1/completions",
            completions,
            body=CompletionRequest,
            answer=CompletionResponse,
            has_events=True,
            statuses=_STATUSES,
        ),
        Route(
            "POST",
            "/v1/chat/completions",
            chat_completions,
            body=ChatCompletionRequest,
            answer=ChatCompletionResponse,
            has_events=True,
            statuses=_STATUSES,
        ),
    ]
