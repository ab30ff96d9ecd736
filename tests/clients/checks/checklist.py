"""What every check script shares. Standard library only: it runs in any client's environment.

A script is a module of functions `check_*`, run from top to bottom. It prints one line for each
("ok NAME" or "FAILED NAME: why") and exits with the number of failures, at most 100. What it
checks against comes as JSON in the environment variable FLOWKV_CHECK; see `Surroundings`.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Surroundings:
    """Where the server is, and what a check may use.

    Attributes:
        servers: for each server that the check wants, by name: {"http": URL, "grpc": HOST:PORT,
            "pid": number, "api_key": str or None}.
        model: name that the servers serve it under.
        tokenizer: folder with the model's tokenizer in Hugging Face's form.
        scratch: an empty folder.
    """

    servers: dict[str, dict[str, Any]]
    model: str
    tokenizer: str
    scratch: str

    @property
    def server(self) -> dict[str, Any]:
        """The first server."""
        return next(iter(self.servers.values()))

    @property
    def http(self) -> str:
        """Address of the first server's HTTP, without a slash at the end."""
        return str(self.server["http"])

    @property
    def grpc(self) -> str:
        """Address of the first server's gRPC, HOST:PORT."""
        return str(self.server["grpc"])


surroundings = Surroundings(
    **json.loads(
        os.environ.get("FLOWKV_CHECK")
        or '{"servers": {}, "model": "", "tokenizer": "", "scratch": ""}'
    )
)


class CheckFailed(Exception):
    """A promise that was not kept, as text."""


def require(condition: object, message: str) -> None:
    """Raise `CheckFailed` unless `condition` holds."""
    if not condition:
        raise CheckFailed(message)


def require_equal(got: object, wanted: object, what: str) -> None:
    """Raise `CheckFailed` unless both are equal."""
    if got != wanted:
        raise CheckFailed(f"{what} is {got!r:.300}, and should be {wanted!r:.300}")


def get(url: str, *, api_key: str | None = None, timeout_s: float = 30) -> tuple[int, bytes]:
    """Status and body of a GET, whatever the status."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def num_unfinished(http: str, api_key: str | None = None) -> int:
    """Requests that run or wait, over all nodes of a server."""
    status, body = get(f"{http}/v1/loads", api_key=api_key)
    require_equal(status, 200, "the status of /v1/loads")
    total = json.loads(body)["total"]
    return int(total["num_requests_running"] + total["num_requests_waiting"])


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 20) -> None:
    """Raise `CheckFailed` unless `condition` comes to hold."""
    ends_at = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > ends_at:
            raise CheckFailed(f"after {timeout_s:g} s still not so: {what}")
        time.sleep(0.05)


def run_checks(module_name: str, *arguments: object) -> None:
    """Run every `check_*` of a module with these arguments, in order, and exit."""
    module = sys.modules[module_name]
    functions = [
        value
        for name, value in inspect.getmembers(module, inspect.isfunction)
        if name.startswith("check_") and value.__module__ == module_name
    ]
    functions.sort(key=lambda function: function.__code__.co_firstlineno)
    wanted = set(sys.argv[1:])
    num_failed = 0
    for function in functions:
        name = function.__name__.removeprefix("check_")
        if wanted and name not in wanted:
            continue
        began_at = time.monotonic()
        try:
            function(*arguments)
        except CheckFailed as failure:
            num_failed += 1
            print(f"FAILED {name}: {failure}", flush=True)
        except Exception as error:
            num_failed += 1
            where = traceback.extract_tb(error.__traceback__)
            line = next((f.lineno for f in reversed(where) if f.filename == module.__file__), 0)
            name_of_file = Path(str(module.__file__)).name
            text = " ".join(str(error).split())[:600]
            print(
                f"FAILED {name}: {name_of_file}:{line}: {type(error).__name__}: {text}",
                flush=True,
            )
            traceback.print_exc()
        else:
            print(f"ok {name} ({time.monotonic() - began_at:.1f} s)", flush=True)
    sys.exit(min(num_failed, 100))
