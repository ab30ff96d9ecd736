"""A client in a process of its own, for servers on other hosts.

python -m tests.ask_server ADDRESS NUM_PROMPT NUM_TOKENS      prints JSON
"""

from __future__ import annotations

import json
import sys

from flowkv_jax import Client, SamplingParams


def main(address: str, num_prompt: int, num_tokens: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    with Client(address) as client:
        output = client.generate({"prompt_token_ids": list(range(7, 7 + num_prompt))}, params)[0]
        record = client.cluster.records(1)[0]
    backend = None if record.handoff is None else record.handoff.backend
    print(json.dumps({"token_ids": output.outputs[0].token_ids, "backend": backend}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
