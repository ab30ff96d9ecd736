"""Open Inference Protocol through `tritonclient.grpc`: unary calls and the decoupled stream."""

from __future__ import annotations

import json
import queue
from typing import Any

import numpy as np
from checklist import num_unfinished, require, require_equal, run_checks, surroundings, wait_until
from tritonclient import grpc as triton
from tritonclient.utils import InferenceServerException

MODEL = surroundings.model
PROMPT = "The capital of France is"
GREEDY = {"temperature": 0, "max_tokens": 12}


def _client() -> Any:
    return triton.InferenceServerClient(surroundings.grpc)


def _inputs(
    prompt: str, parameters: dict[str, Any], *, stream: bool = False, echo: bool | None = None
) -> list[Any]:
    values: dict[str, tuple[str, Any]] = {
        "text_input": ("BYTES", np.array([prompt.encode()], dtype=np.object_)),
        "stream": ("BOOL", np.array([stream])),
        "sampling_parameters": (
            "BYTES",
            np.array([json.dumps(parameters).encode()], dtype=np.object_),
        ),
    }
    if echo is not None:
        values["exclude_input_in_output"] = ("BOOL", np.array([not echo]))
    inputs = []
    for name, (datatype, array) in values.items():
        tensor = triton.InferInput(name, [1], datatype)
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


def _text(result: Any) -> str:
    return str(result.as_numpy("text_output").reshape(-1)[0].decode())


def check_health_and_metadata() -> None:
    with _client() as client:
        require(client.is_server_live() and client.is_server_ready(), "not live or not ready")
        require(client.is_model_ready(MODEL), "the model is not ready")
        require(not client.is_model_ready("no-such-model"), "an unknown model is ready")
        require(client.get_server_metadata().name, "the server has no name")
        metadata = client.get_model_metadata(MODEL)
        require_equal(metadata.name, MODEL, "the model's name")
        inputs = {tensor.name: tensor.datatype for tensor in metadata.inputs}
        require_equal(inputs.get("text_input"), "BYTES", "the type of text_input")
        require_equal(metadata.outputs[0].name, "text_output", "the output's name")


def check_unary() -> None:
    with _client() as client:
        result = client.infer(MODEL, _inputs(PROMPT, GREEDY, echo=False), request_id="mine")
        require("Paris" in _text(result), f"answer: {_text(result)!r}")
        require(not _text(result).startswith(PROMPT), "the prompt was echoed")
        response = result.get_response()
        require_equal((response.model_name, response.id), (MODEL, "mine"), "model and id")
        echoed = client.infer(MODEL, _inputs(PROMPT, GREEDY, echo=True))
        require_equal(_text(echoed), PROMPT + _text(result), "the text with the prompt")


def check_several_prompts_parameters_and_outputs() -> None:
    prompts = triton.InferInput("text_input", [2], "BYTES")
    prompts.set_data_from_numpy(np.array([b"One, two,", PROMPT.encode()], dtype=np.object_))
    with _client() as client:
        result = client.infer(
            MODEL,
            [prompts],
            parameters=GREEDY,
            outputs=[
                triton.InferRequestedOutput("text_output"),
                triton.InferRequestedOutput("num_output_tokens"),
            ],
        )
        texts = result.as_numpy("text_output")
        require_equal(texts.shape, (2,), "the shape of text_output")
        require("Paris" in texts[1].decode(), f"answers: {texts}")
        counts = result.as_numpy("num_output_tokens").tolist()
        require_equal(counts, [12, 12], "num_output_tokens")


def check_asynchronous_unary() -> None:
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with _client() as client:
        for _ in range(4):
            client.async_infer(
                MODEL,
                _inputs(PROMPT, GREEDY, echo=False),
                callback=lambda result, error: answers.put((result, error)),
            )
        for _ in range(4):
            result, error = answers.get(timeout=60)
            require(error is None, f"{error}")
            require("Paris" in _text(result), f"answer: {_text(result)!r}")


def check_stream() -> None:
    with _client() as client:
        whole = _text(client.infer(MODEL, _inputs(PROMPT, GREEDY, echo=False)))
    for wants_empty_final in (False, True):
        results = _stream(
            [_inputs(PROMPT, GREEDY, stream=True, echo=False)],
            enable_empty_final_response=wants_empty_final,
        )
        text = "".join(_text(r) for r in results if r.as_numpy("text_output") is not None)
        require_equal(text, whole, "the streamed text")
        finals = [
            r.get_response().parameters["triton_final_response"].bool_param
            for r in results
            if "triton_final_response" in r.get_response().parameters
        ]
        require(not any(finals[:-1]), "a response before the last is final")
        if wants_empty_final:
            require(finals and finals[-1], "no response is final")


def check_two_requests_on_one_stream() -> None:
    requests = [_inputs(PROMPT, GREEDY, stream=True, echo=False) for _ in range(2)]
    results = _stream(requests, enable_empty_final_response=True)
    ids = {result.get_response().id for result in results}
    require_equal(ids, {"0", "1"}, "the ids of the responses")


def check_errors() -> None:
    with _client() as client:
        for model, inputs, status in (
            ("no-such-model", _inputs(PROMPT, GREEDY), "NOT_FOUND"),
            (MODEL, _inputs(PROMPT, {"temperature": -1}), "INVALID_ARGUMENT"),
            (MODEL, _inputs(PROMPT, {"no_such_parameter": 1}), "INVALID_ARGUMENT"),
            (MODEL, _inputs(PROMPT, GREEDY)[1:], "INVALID_ARGUMENT"),
        ):
            try:
                client.infer(model, inputs)
            except InferenceServerException as error:
                require(status in str(error.status()), f"{error.status()}: {error.message()}")
            else:
                require(False, f"accepted; {status} was due")


def check_cancelled_stream_frees_its_request() -> None:
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with _client() as client:
        client.start_stream(callback=lambda result, error: results.put((result, error)))
        endless = {"max_tokens": 1500, "ignore_eos": True}
        client.async_stream_infer(MODEL, _inputs(PROMPT, endless, stream=True))
        results.get(timeout=60)
        client.stop_stream(cancel_requests=True)
    wait_until(lambda: num_unfinished(surroundings.http) == 0, "the request is gone", 10)


def _stream(requests: list[list[Any]], **options: Any) -> list[Any]:
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    received = []
    with _client() as client:
        client.start_stream(callback=lambda result, error: results.put((result, error)))
        for number, inputs in enumerate(requests):
            client.async_stream_infer(MODEL, inputs, request_id=str(number), **options)
        client.stop_stream()
        while not results.empty():
            result, error = results.get()
            require(error is None, f"{error}")
            received.append(result)
    return received


if __name__ == "__main__":
    run_checks(__name__)
