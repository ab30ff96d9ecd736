"""smg in front of one worker, over `vllm.grpc.engine.VllmEngine`."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from checklist import (
    num_unfinished,
    require,
    require_equal,
    run_checks,
    surroundings,
    wait_until,
)
from router import Router, router

GREEDY: dict[str, Any] = {
    "model": surroundings.model,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 24,
}


def check_conversations(gateway: Router) -> None:
    status, answer = gateway.post("/v1/chat/completions", GREEDY)
    require_equal(status, 200, f"the status ({answer})")
    (choice,) = answer["choices"]
    require("Paris" in choice["message"]["content"], f"answer: {choice}")
    require(answer["usage"]["completion_tokens"] > 3, f"usage: {answer['usage']}")
    text, reason = "", None
    for event in gateway.stream("/v1/chat/completions", GREEDY):
        for part in event["choices"]:
            text += part["delta"].get("content") or ""
            reason = part["finish_reason"] or reason
    require_equal(text, choice["message"]["content"], "the streamed text")
    require_equal(reason, choice["finish_reason"], "how the stream finished")


def check_completions(gateway: Router) -> None:
    body = {"model": surroundings.model, "prompt": "The capital of France is"}
    status, answer = gateway.post("/v1/completions", {**body, "temperature": 0, "max_tokens": 8})
    require_equal(status, 200, f"the status ({answer})")
    require("Paris" in answer["choices"][0]["text"], f"answer: {answer}")


def check_several_answers_stop_and_logprobs(gateway: Router) -> None:
    several = {**GREEDY, "n": 2, "temperature": 1, "seed": 3}
    status, answer = gateway.post("/v1/chat/completions", several)
    require_equal(status, 200, f"the status with n=2 ({answer})")
    require_equal(len(answer["choices"]), 2, "answers")
    status, answer = gateway.post("/v1/chat/completions", {**GREEDY, "stop": ["Paris"]})
    require_equal(status, 200, f"the status with stop ({answer})")
    require("Paris" not in answer["choices"][0]["message"]["content"], f"{answer}")
    require_equal(answer["choices"][0]["finish_reason"], "stop", "finish_reason")
    scored = {**GREEDY, "logprobs": True, "top_logprobs": 2}
    status, answer = gateway.post("/v1/chat/completions", scored)
    require_equal(status, 200, f"the status with logprobs ({answer})")
    tokens = answer["choices"][0]["logprobs"]["content"]
    require(all(token["logprob"] <= 0 for token in tokens), f"logprobs: {tokens[:2]}")


def check_structured_answer(gateway: Router) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form = {"name": "x", "schema": {**schema, "additionalProperties": False}, "strict": True}
    status, answer = gateway.post(
        "/v1/chat/completions",
        {**GREEDY, "response_format": {"type": "json_schema", "json_schema": form}},
    )
    require_equal(status, 200, f"the status ({answer})")
    text = answer["choices"][0]["message"]["content"]
    require(json.loads(text) in ({"ok": True}, {"ok": False}), f"answer: {text!r}")


def check_errors(gateway: Router) -> None:
    for change, wanted in (
        ({"temperature": -1}, (400,)),
        ({"model": "no-such-model"}, (404, 503)),
        ({"messages": [{"role": "user", "content": "word " * 20_000}]}, (400, 413)),
    ):
        status, answer = gateway.post("/v1/chat/completions", {**GREEDY, **change})
        require(status in wanted, f"status {status} for {str(change)[:60]}: {str(answer)[:200]}")


def check_client_that_leaves_is_aborted(gateway: Router) -> None:
    body = {**GREEDY, "max_tokens": 1500, "ignore_eos": True}
    events = gateway.stream("/v1/chat/completions", body)
    for _, _ in zip(range(3), events, strict=False):
        pass
    wait_until(lambda: num_unfinished(surroundings.http) > 0, "/v1/loads shows the request", 5)
    events.close()
    wait_until(lambda: num_unfinished(surroundings.http) == 0, "the request is gone", 10)


def check_many_at_once(gateway: Router) -> None:
    def ask(number: int) -> int:
        turns = [{"role": "user", "content": f"Tell of the number {number}."}]
        body = {**GREEDY, "messages": turns, "ignore_eos": True, "max_tokens": 12}
        status, answer = gateway.post("/v1/chat/completions", body)
        return answer["usage"]["completion_tokens"] if status == 200 else -status

    with ThreadPoolExecutor(12) as pool:
        require_equal(list(pool.map(ask, range(24))), [12] * 24, "tokens of 24 requests at once")


if __name__ == "__main__":
    with router("--worker-urls", f"grpc://{surroundings.grpc}") as running:
        run_checks(__name__, running)
