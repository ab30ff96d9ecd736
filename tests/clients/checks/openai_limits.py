"""Keys, a full queue, retries and a draining server, as the `openai` package meets them.

The server wants a key, decodes one request at a time, and lets one wait.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
from checklist import (
    get,
    num_unfinished,
    require,
    require_equal,
    run_checks,
    surroundings,
    wait_until,
)

KEY = surroundings.server["api_key"]
MODEL = surroundings.model
LONG: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Tell a long story."}],
    "max_tokens": 1800,
    "stream": True,
    "extra_body": {"ignore_eos": True},
}
SHORT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 2,
}


def _client(key: str = KEY, retries: int = 0, **more: Any) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{surroundings.http}/v1", api_key=key, max_retries=retries, timeout=120, **more
    )


def _num_unfinished() -> int:
    return num_unfinished(surroundings.http, KEY)


@contextmanager
def _full_server() -> Iterator[None]:
    """One request runs and one waits."""
    client = _client()
    runs, stop = threading.Event(), threading.Event()

    def hold() -> None:
        with client.chat.completions.create(**LONG) as stream:
            for chunk in stream:
                if chunk.choices[0].delta.content:
                    runs.set()
                if stop.is_set():
                    return

    holders = [threading.Thread(target=hold) for _ in range(2)]
    try:
        holders[0].start()
        # Until its first token it counts as one that waits.
        require(runs.wait(120), "the first request has no token after 120 s")
        holders[1].start()
        wait_until(lambda: _num_unfinished() == 2, "one request runs and one waits")
        yield
    finally:
        stop.set()
        for holder in holders:
            if holder.ident is not None:
                holder.join(60)


def check_wrong_key() -> None:
    for key in ("wrong", KEY[:-1], KEY + "x"):
        try:
            _client(key).models.list()
        except openai.AuthenticationError as error:
            require_equal(error.code, "invalid_api_key", "the error's code")
            require(isinstance(error.body, dict) and error.body.get("message"), f"{error.body!r}")
            require(KEY not in str(error), "the error tells the key")
        else:
            require(False, f"the key {key!r:.8} was let in")
    require(_client().models.list().data, "the right key was not let in")


def check_every_route_but_health_wants_the_key() -> None:
    paths = ("/v1/models", "/metrics", "/v1/loads", "/openapi.json", "/version", "/trace")
    for path in paths:
        require_equal(get(surroundings.http + path)[0], 401, f"the status of {path} without key")
    for path in ("//v1/models", "/v1/../v1/models", "/%76%31/models", "/V1/models", "/nothing"):
        require(get(surroundings.http + path)[0] in (401, 404), f"{path} was served without key")
    require_equal(get(f"{surroundings.http}/health")[0], 200, "the status of /health")


def check_full_queue_is_a_rate_limit() -> None:
    with _full_server():
        try:
            _client().chat.completions.create(**SHORT)
        except openai.RateLimitError as error:
            retry_after = error.response.headers.get("retry-after")
            require(retry_after and int(retry_after) >= 1, f"Retry-After: {retry_after!r}")
            require(error.body and error.body.get("message"), f"body: {error.body!r}")
        else:
            require(False, "a third request was taken")
        try:
            _client().chat.completions.create(**SHORT, stream=True)
        except openai.RateLimitError:
            pass
        else:
            require(False, "a stream began and then failed")


def check_retries_until_there_is_room() -> None:
    statuses: list[int] = []
    hooks = {"response": [lambda response: statuses.append(response.status_code)]}
    client = _client(retries=5, http_client=openai.DefaultHttpxClient(event_hooks=hooks))
    outcome: list[Any] = []

    def ask() -> None:
        outcome.append(client.chat.completions.create(**SHORT))

    with _full_server():
        patient = threading.Thread(target=ask)
        patient.start()
        wait_until(lambda: 429 in statuses, "the first try is refused")
    patient.join(60)
    require(outcome and outcome[0].choices, f"no answer; statuses {statuses}")
    require(statuses[0] == 429 and statuses[-1] == 200, f"statuses: {statuses}")


def check_queue_is_empty_afterwards() -> None:
    wait_until(lambda: _num_unfinished() == 0, "nothing runs or waits")
    require(_client().chat.completions.create(**SHORT).choices, "no answer")


def check_draining_server() -> None:
    """The last check: it ends the server."""
    client = _client()
    with client.chat.completions.create(**{**LONG, "max_tokens": 400}) as stream:
        next(iter(stream))
        os.kill(surroundings.server["pid"], signal.SIGTERM)
        ready = f"{surroundings.http}/ready"
        wait_until(lambda: get(ready)[0] == 503, "/ready answers 503", 5)
        refused: openai.APIError | None = None
        ends_at = time.monotonic() + 10
        while refused is None and time.monotonic() < ends_at:
            try:
                client.chat.completions.create(**SHORT)
            except openai.APIError as error:
                refused = error
        require(refused is not None, "a draining server takes requests")
        require(isinstance(refused, openai.APIStatusError), f"while draining: {refused!r}")
        require_equal(refused.status_code, 503, "the status while draining")
        require(refused.response.headers.get("retry-after"), "no Retry-After while draining")
        chunks = list(stream)
    require_equal(chunks[-1].choices[0].finish_reason, "length", "what ran was finished by")


if __name__ == "__main__":
    run_checks(__name__)
