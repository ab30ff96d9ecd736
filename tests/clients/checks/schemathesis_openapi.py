"""schemathesis over `/openapi.json`: no 500, and nothing against the schema is accepted."""

from __future__ import annotations

import json
from pathlib import Path

from checklist import (
    get,
    num_unfinished,
    require,
    require_equal,
    run_checks,
    surroundings,
    wait_until,
)
from tool import program, run_tool

SEED = "20261130"
MAX_EXAMPLES = "25"
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
)
WANTED_PATHS = {
    *("/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/detokenize"),
    *("/health", "/ready", "/version", "/metrics", "/v1/loads"),
}


def check_document_has_every_route() -> None:
    status, body = get(f"{surroundings.http}/openapi.json")
    require_equal(status, 200, "the status of /openapi.json")
    document = json.loads(body)
    require(str(document["openapi"]).startswith("3."), f"openapi: {document['openapi']}")
    missing = WANTED_PATHS - set(document["paths"])
    require(not missing, f"not in /openapi.json: {sorted(missing)}")


def check_every_operation() -> None:
    report = Path(surroundings.scratch) / "report.xml"
    output = run_tool(
        [
            *(program("st"), "run", f"{surroundings.http}/openapi.json", "--no-color"),
            *("--phases", "examples,coverage,fuzzing", "--max-examples", MAX_EXAMPLES),
            *("--seed", SEED, "--generation-deterministic"),
            *("--checks", ",".join(CHECKS), "--continue-on-failure"),
            *("--request-timeout", "60", "--suppress-health-check", "all"),
            *("--report", "junit", "--report-junit-path", str(report)),
        ],
        timeout_s=560,
        environ={
            "SCHEMATHESIS_HOOKS": "schemathesis_hooks",
            "PYTHONPATH": str(Path(__file__).parent),
        },
    )
    print("\n".join(output.splitlines()[-25:]))


def check_nothing_is_left_behind() -> None:
    wait_until(lambda: num_unfinished(surroundings.http) == 0, "nothing runs or waits", 30)
    require_equal(get(f"{surroundings.http}/health")[0], 200, "the status of /health")


if __name__ == "__main__":
    run_checks(__name__)
