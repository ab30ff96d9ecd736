"""What a server says of itself over HTTP, tokens, and the document that describes all routes."""

import json
from dataclasses import replace
from typing import Any

import httpx
import jsonschema
import pytest

from flowkv_jax.http.app import all_routes
from flowkv_jax.http.route import Route
from tests.fake_engine import LOAD, FakeEngine
from tests.http_wire import answering
from tests.recorded_cluster import RecordedView

CHAT = [{"role": "user", "content": "hi"}]


async def got(method: str, path: str, engine: FakeEngine | None = None, **more: Any) -> Any:
    async with answering(engine=engine) as url, httpx.AsyncClient(base_url=url) as client:
        return await client.request(method, path, **more)


@pytest.mark.parametrize("is_healthy", [True, False])
async def test_health(is_healthy: bool) -> None:
    engine = FakeEngine()
    engine.is_healthy = is_healthy
    for path in ("/health", "/ready", "/v2/health/live", "/v2/models/fake/ready"):
        answer = await got("GET", path, engine)
        assert answer.status_code == (200 if is_healthy else 503)
        assert answer.content == b"" and "content-type" not in answer.headers


async def test_a_cluster_without_a_node_is_not_ready() -> None:
    engine, view = FakeEngine(), RecordedView()
    engine.cluster = view
    assert (await got("GET", "/ready", engine)).status_code == 200
    view.snapshot_now = replace(view.snapshot_now, nodes=())
    assert (await got("GET", "/ready", engine)).status_code == 503
    assert (await got("GET", "/health", engine)).status_code == 200


async def test_version_and_models() -> None:
    assert (await got("GET", "/version")).json() == {"version": "1.2.3"}
    card = {
        "id": "fake",
        "object": "model",
        "created": 7,
        "owned_by": "flowkv",
        "root": "models/fake.gguf",
        "parent": None,
        "max_model_len": 64,
    }
    assert (await got("GET", "/v1/models")).json() == {"object": "list", "data": [card]}
    assert (await got("GET", "/v1/models/fake")).json() == card
    assert (await got("GET", "/v1/models/f%61ke")).json() == card
    for name in ("other", "org/fake", "org%2Ffake", "fake/"):
        answer = await got("GET", f"/v1/models/{name}")
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"
    assert (await got("GET", "/v1/models/")).json()["error"]["code"] == "not_found"
    assert (await got("GET", "/v1/models/%ff")).status_code == 404


@pytest.mark.parametrize("path", ["/v1/loads", "/load"])
async def test_loads(path: str) -> None:
    engine = FakeEngine()
    assert (await got("GET", path, engine)).json() == {"total": LOAD.to_dict(), "nodes": []}
    engine.cluster = RecordedView()
    nodes = (await got("GET", path, engine)).json()["nodes"]
    assert [(n["name"], n["role"], n["load"] is None) for n in nodes] == [
        ("decode-0", "decode", False),
        ("prefill-0", "prefill", False),
        ("prefill-1", "prefill", True),
    ]


async def test_metrics() -> None:
    answer = await got("GET", "/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    assert "vllm:num_requests_running" in answer.text
    wanted = {"accept": "application/openmetrics-text"}
    answer = await got("GET", "/metrics", headers=wanted)
    assert answer.headers["content-type"].startswith("application/openmetrics-text")


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_tokens_there_and_back(prefix: str) -> None:
    answer = await got("POST", prefix + "/tokenize", json={"prompt": "ab", "model": "fake"})
    assert answer.json() == {
        "count": 3,
        "max_model_len": 64,
        "tokens": [1, 97, 98],
        "token_strs": None,
    }
    asked = {"prompt": "ab", "add_special_tokens": False, "return_token_strs": True}
    answer = await got("POST", prefix + "/tokenize", json=asked)
    assert (answer.json()["tokens"], answer.json()["token_strs"]) == ([97, 98], ["a", "b"])
    answer = await got("POST", prefix + "/detokenize", json={"tokens": [97, 98]})
    assert answer.json() == {"prompt": "ab"}


async def test_tokens_of_a_conversation() -> None:
    engine = FakeEngine()
    answer = await got("POST", "/tokenize", engine, json={"messages": CHAT})
    assert answer.json()["tokens"] == [1, 104, 105]
    tool = {"type": "function", "function": {"name": "f"}}
    asked = {"messages": CHAT, "tools": [tool], "chat_template_kwargs": {"x": 1}}
    assert (await got("POST", "/tokenize", engine, json=asked)).status_code == 200
    assert engine.rendered[-1] == (CHAT, {"tools": [tool], "x": 1})


@pytest.mark.parametrize(
    ("path", "body", "parameter"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, "prompt"),
        ("/tokenize", {"prompt": None}, "prompt"),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/tokenize", {"prompt": "x" * (1 << 20) + "x"}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": CHAT, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": CHAT, "chat_template": "{{ 1 }}"}, "chat_template"),
        ("/detokenize", {}, None),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1, 1000]}, "tokens"),
        ("/detokenize", {"tokens": ["1"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1.0]}, "tokens[0]"),
        ("/detokenize", {"tokens": "1"}, "tokens"),
    ],
)
async def test_what_is_no_such_request(path: str, body: Any, parameter: str | None) -> None:
    answer = await got("POST", path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == parameter
    assert len(answer.content) < 1000


async def test_another_model() -> None:
    for path, body in [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": []})]:
        answer = await got("POST", path, json={**body, "model": "other"})
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"


async def test_methods_that_are_not_answered() -> None:
    answer = await got("DELETE", "/version")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "GET, HEAD"
    assert (await got("GET", "/tokenize")).headers["allow"] == "POST"


# The Open Inference Protocol


async def test_inference_metadata() -> None:
    assert (await got("GET", "/v2")).json() == {
        "name": "flowkv-jax",
        "version": "1.2.3",
        "extensions": ["generate"],
    }
    told = (await got("GET", "/v2/models/fake")).json()
    assert (told["name"], told["versions"], told["platform"]) == ("fake", ["1"], "flowkv-jax")
    assert told["inputs"] == [{"name": "text_input", "datatype": "BYTES", "shape": [1]}]
    for path in ("/v2/models/other", "/v2/models/other/ready"):
        assert (await got("GET", path)).json()["error"]["code"] == "model_not_found"


async def test_generate() -> None:
    engine = FakeEngine()
    asked: dict[str, Any] = {"text_input": "a", "parameters": {"max_new_tokens": 3}}
    answer = await got("POST", "/v2/models/fake/generate", engine, json={**asked, "id": "i"})
    assert answer.json() == {
        "id": "i",
        "model_name": "fake",
        "model_version": "1",
        "text_output": "t0 t1 t2 ",
    }
    assert engine.received[0].params.max_tokens == 3
    asked["parameters"]["details"] = True
    answer = await got("POST", "/v2/models/fake/generate_stream", json=asked)
    assert answer.headers["content-type"] == "text/event-stream"
    *events, end = answer.text.split("\n\n")
    told = [json.loads(line.removeprefix("data: ")) for line in events]
    assert "".join(one["text_output"] for one in told) == "t0 t1 t2 " and end == ""
    last = {"finish_reason": "length", "num_input_tokens": 2, "num_output_tokens": 3}
    assert told[-1]["details"] == last


@pytest.mark.parametrize(
    ("body", "parameter"),
    [
        ({}, None),
        ({"text_input": ""}, "text_input"),
        ({"text_input": ["a"]}, "text_input"),
        ({"text_input": "a", "parameters": {"temperature": -1}}, "temperature"),
        ({"text_input": "a", "parameters": {"nonsense": 1}}, "nonsense"),
        ({"text_input": "a", "parameters": {"n": 2}}, "n"),
        ({"text_input": "a", "parameters": {"stream": "yes"}}, "stream"),
    ],
)
async def test_what_cannot_be_generated(body: Any, parameter: str | None) -> None:
    for path in ("/v2/models/fake/generate", "/v2/models/fake/generate_stream"):
        answer = await got("POST", path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, parameter)


# The document


async def document(key: str | None = None) -> Any:
    keys = [] if key is None else [key]
    async with answering(keys=keys) as url, httpx.AsyncClient(base_url=url) as client:
        headers = {"authorization": f"Bearer {key}"}
        return (await client.get("/openapi.json", headers=headers)).json()


async def test_the_document_lists_every_route() -> None:
    told = await document()
    assert told["openapi"] == "3.1.0"
    listed = {(m.upper(), path) for path, item in told["paths"].items() for m in item}
    assert listed == {(r.method, r.path.replace(":path}", "}")) for r in all_routes()}


async def test_the_document_tells_who_needs_a_key() -> None:
    assert "security" not in (await document())["paths"]["/version"]["get"]
    told = await document("k")
    for route in all_routes():
        path = route.path.replace(":path}", "}")
        operation = told["paths"][path][route.method.lower()]
        assert operation["security"] == ([] if route.is_open else [{"key": []}])
        assert ("401" in operation["responses"]) is not route.is_open
    assert told["components"]["securitySchemes"]["key"]["scheme"] == "bearer"


async def test_every_reference_of_the_document_leads_somewhere() -> None:
    told = await document()
    text = json.dumps(told)
    names = {part.partition('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert names == set(told["components"]["schemas"])
    for schema in told["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


def validator(told: Any, schema: Any) -> Any:
    return jsonschema.Draft202012Validator({**schema, "components": told["components"]})


ANSWERED: list[tuple[str, str, Any]] = [
    ("GET", "/version", None),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/{model}", None),
    ("GET", "/v1/loads", None),
    ("POST", "/tokenize", {"messages": CHAT, "return_token_strs": True}),
    ("POST", "/detokenize", {"tokens": [97]}),
    ("POST", "/detokenize", {"tokens": ["a"]}),
    ("POST", "/tokenize", {"prompt": "a", "model": "other"}),
    ("POST", "/tokenize", {}),
]


@pytest.mark.parametrize(("method", "path", "body"), ANSWERED)
async def test_answers_are_as_the_document_says(method: str, path: str, body: Any) -> None:
    told = await document()
    engine = FakeEngine()
    engine.cluster = RecordedView()
    answer = await got(method, path.replace("{model}", "fake"), engine, json=body)
    response = told["paths"][path][method.lower()]["responses"][str(answer.status_code)]
    content = response["content"][answer.headers["content-type"]]
    validator(told, content["schema"]).validate(answer.json())
    if body is not None:
        asked = told["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        is_valid = validator(told, asked["schema"]).is_valid(body)
        assert is_valid is (answer.status_code in (200, 404))


def test_routes_say_what_they_do() -> None:
    def summary(route: Route) -> str:
        return (route.handler.__doc__ or "").strip().splitlines()[0]

    for route in all_routes():
        assert summary(route).endswith("."), route.path
