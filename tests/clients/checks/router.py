"""smg's router in front of workers, for its checks. Standard library only."""

from __future__ import annotations

import contextlib
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from checklist import CheckFailed, get, surroundings, wait_until
from tool import background, program


class Router:
    """A running router: requests as a client without a library sends them."""

    def __init__(self, http: str) -> None:
        self.http = http

    def post(self, path: str, body: dict[str, Any], timeout_s: float = 120) -> Any:
        """Status and JSON body of the answer."""
        request = urllib.request.Request(
            self.http + path,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                text = error.read().decode("utf-8", errors="replace")
            try:
                return error.code, json.loads(text)
            except ValueError:
                return error.code, text

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a stream; closing it closes the connection."""
        request = urllib.request.Request(
            self.http + path,
            data=json.dumps({**body, "stream": True}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise CheckFailed(f"the stream says {event['error']}")
                    yield event


@contextlib.contextmanager
def router(*flags: str) -> Iterator[Router]:
    """`smg launch` with these flags, ready to serve; its log is `smg.log`."""
    with contextlib.ExitStack() as ports:
        listeners = [ports.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        port, metrics_port = (listener.getsockname()[1] for listener in listeners)
    command = [
        *(program("smg"), "launch", "--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
        *("--log-level", "info", *flags),
    ]
    with background(command, "smg.log") as process:

        def is_ready() -> bool:
            if process.poll() is not None:
                log = (Path(surroundings.scratch) / "smg.log").read_text(errors="replace")
                raise CheckFailed(f"smg ended: {' '.join(log.split())[-500:]}")
            try:
                return get(f"http://127.0.0.1:{port}/readiness", timeout_s=5)[0] == 200
            except OSError:
                return False

        wait_until(is_ready, "smg is ready", 60)
        yield Router(f"http://127.0.0.1:{port}")
