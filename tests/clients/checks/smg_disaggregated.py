"""smg with `--pd-disaggregation` over two servers: each prompt is computed by one, and its K/V goes
to the other, which decodes."""

from __future__ import annotations

import smg_router
from checklist import (
    get,
    num_unfinished,
    require,
    require_equal,
    run_checks,
    surroundings,
    wait_until,
)
from router import Router, router

PREFILL, DECODE = (surroundings.servers[kind] for kind in ("prefill", "decode"))


def _num_handoffs(server: dict[str, str]) -> float:
    """Hand-offs that this server has received, by its metrics."""
    status, body = get(f"{server['http']}/metrics")
    require_equal(status, 200, "the status of /metrics")
    return sum(
        float(line.rpartition(" ")[2])
        for line in body.decode().splitlines()
        if line.startswith("flowkv_handoff_seconds_count") and 'phase="total"' in line
    )


def _require_idle() -> None:
    for server in (PREFILL, DECODE):
        http = server["http"]
        wait_until(lambda http=http: num_unfinished(http) == 0, f"{http} has no request", 15)


def check_each_prompt_is_handed_off(gateway: Router) -> None:
    before = _num_handoffs(DECODE)
    direct = Router(DECODE["http"]).post("/v1/chat/completions", smg_router.GREEDY)[1]
    require_equal(_num_handoffs(DECODE), before, "hand-offs when asked without the router")
    for number in range(3):
        turns = [{"role": "user", "content": f"Say the number {number} and stop."}]
        body = {**smg_router.GREEDY, "messages": turns}
        status, answer = gateway.post("/v1/chat/completions", body)
        require_equal(status, 200, f"the status ({answer})")
    require_equal(_num_handoffs(DECODE) - before, 3, "hand-offs of three requests")
    require_equal(_num_handoffs(PREFILL), 0, "hand-offs to the prefill server")
    status, answer = gateway.post("/v1/chat/completions", smg_router.GREEDY)
    require_equal(status, 200, f"the status ({answer})")
    require_equal(
        answer["choices"][0]["message"]["content"],
        direct["choices"][0]["message"]["content"],
        "the answer, against that of one server alone",
    )
    _require_idle()


def check_conversations(gateway: Router) -> None:
    smg_router.check_conversations(gateway)


def check_completions(gateway: Router) -> None:
    smg_router.check_completions(gateway)


def check_stop_and_length(gateway: Router) -> None:
    for change, reason in (({"stop": ["Paris"]}, "stop"), ({"max_tokens": 2}, "length")):
        body = {**smg_router.GREEDY, **change}
        status, answer = gateway.post("/v1/chat/completions", body)
        require_equal(status, 200, f"the status with {change} ({answer})")
        require_equal(answer["choices"][0]["finish_reason"], reason, f"how {change} finished")


def check_structured_answer(gateway: Router) -> None:
    smg_router.check_structured_answer(gateway)


def check_long_prompt(gateway: Router) -> None:
    turns = [{"role": "user", "content": "The capital of France is Paris. " * 120 + "Repeat."}]
    status, answer = gateway.post("/v1/chat/completions", {**smg_router.GREEDY, "messages": turns})
    require_equal(status, 200, f"the status ({answer})")
    require(answer["usage"]["prompt_tokens"] > 800, f"usage: {answer['usage']}")
    require("Paris" in answer["choices"][0]["message"]["content"], f"{answer['choices']}")


def check_client_that_leaves_frees_both(gateway: Router) -> None:
    body = {**smg_router.GREEDY, "max_tokens": 1500, "ignore_eos": True}
    events = gateway.stream("/v1/chat/completions", body)
    for _, _ in zip(range(3), events, strict=False):
        pass
    http = DECODE["http"]
    wait_until(lambda: num_unfinished(http) > 0, "the decode server shows the request", 5)
    events.close()
    _require_idle()


def check_many_at_once(gateway: Router) -> None:
    before = _num_handoffs(DECODE)
    smg_router.check_many_at_once(gateway)
    require_equal(_num_handoffs(DECODE) - before, 24, "hand-offs of 24 requests at once")
    _require_idle()


if __name__ == "__main__":
    with router(
        "--pd-disaggregation",
        *("--prefill", f"grpc://{PREFILL['grpc']}", "none"),
        *("--decode", f"grpc://{DECODE['grpc']}"),
    ) as running:
        run_checks(__name__, running)
