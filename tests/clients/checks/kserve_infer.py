"""KServe's own client of the Open Inference Protocol, `InferenceGRPCClient`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from checklist import require, require_equal, run_checks, surroundings
from kserve import InferenceGRPCClient, InferInput, InferRequest

MODEL = surroundings.model
PROMPT = "The capital of France is"


def _with_client(use: Callable[[InferenceGRPCClient], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with InferenceGRPCClient(surroundings.grpc, timeout=60) as client:
            return await use(client)

    return asyncio.run(run())


def _request(model: str, *, raw: bool, prompt: str = PROMPT) -> InferRequest:
    parameters = json.dumps({"temperature": 0, "max_tokens": 12})
    inputs = []
    for name, text in (("text_input", prompt), ("sampling_parameters", parameters)):
        if raw:
            tensor = InferInput(name, [1], "BYTES")
            tensor.set_data_from_numpy(
                np.array([text.encode()], dtype=np.object_), binary_data=True
            )
        else:
            tensor = InferInput(name, [1], "BYTES", data=[text.encode()])
        inputs.append(tensor)
    return InferRequest(model_name=model, infer_inputs=inputs, request_id="mine")


def check_health() -> None:
    require(_with_client(lambda client: client.is_server_live()), "the server is not live")
    require(_with_client(lambda client: client.is_server_ready()), "the server is not ready")
    require(_with_client(lambda client: client.is_model_ready(MODEL)), "the model is not ready")


def check_infer_in_both_encodings() -> None:
    texts = []
    for raw in (False, True):
        request = _request(MODEL, raw=raw)
        response = _with_client(lambda client, request=request: client.infer(request))
        require_equal((response.model_name, response.id), (MODEL, "mine"), "model and id")
        output = next(o for o in response.outputs if o.name == "text_output")
        value = output.as_numpy().reshape(-1)[0]
        texts.append(value.decode() if isinstance(value, bytes) else str(value))
    require("Paris" in texts[0], f"answer: {texts[0]!r}")
    require_equal(texts[1], texts[0], "the answer to raw contents")


def check_unknown_model() -> None:
    try:
        _with_client(lambda client: client.infer(_request("no-such-model", raw=False)))
    except Exception as error:
        require("no-such-model" in str(error), f"{error}")
    else:
        require(False, "an unknown model was served")


if __name__ == "__main__":
    run_checks(__name__)
