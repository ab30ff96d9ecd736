"""A server that prefills for others, in a process of its own, without front doors.

python -m tests.kv_prefill_server JSON    the JSON: settings of an `Engine`

Reads prompts as JSON lists of token ids, one a line, and answers each with the
`kv_transfer_params` for the server that is to decode it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flowkv_jax import Engine, SamplingParams
from flowkv_jax.cluster.secret import SECRET_VARIABLE

ROOT = Path(__file__).resolve().parents[1]
Ask = Callable[[list[int]], dict[str, Any]]


@contextmanager
def prefill_server(
    settings: dict[str, Any], secret: bytes
) -> Iterator[tuple[subprocess.Popen[str], Ask]]:
    """The process, and what asks it. It ends with the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.kv_prefill_server", json.dumps(settings)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), SECRET_VARIABLE: secret.decode()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None

    def ask(prompt: list[int]) -> dict[str, Any]:
        assert process.stdin is not None and process.stdout is not None
        print(json.dumps(prompt), file=process.stdin, flush=True)
        params: dict[str, Any] = json.loads(process.stdout.readline())
        return params

    with process:
        try:
            yield process, ask
        finally:
            process.kill()


def main() -> None:
    one_token = SamplingParams(temperature=0, max_tokens=1)
    with Engine(**json.loads(sys.argv[1]), kv_role="kv_producer", kv_port=0) as engine:
        for line in sys.stdin:
            [output] = engine.generate(
                [json.loads(line)], one_token, kv_transfer_params={"do_remote_decode": True}
            )
            print(json.dumps(output.kv_transfer_params), flush=True)


if __name__ == "__main__":
    main()
