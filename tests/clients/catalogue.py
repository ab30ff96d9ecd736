"""The clients, what they need, and what is checked with them.

Requirements give the oldest version that the checks were written with: a run uses the newest.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Check:
    """A script of `checks/`, run against servers of these kinds.

    Attributes:
        script: name in `checks/`, without `.py`.
        servers: kinds in `servers.KINDS`.
        timeout_s: it is ended, and has failed, after this.
        ends_servers: it stops its servers itself; any other check whose server ends has failed.
    """

    script: str
    servers: tuple[str, ...] = ("node",)
    timeout_s: float = 300.0
    ends_servers: bool = False


@dataclass(frozen=True)
class Client:
    """A client with its checks.

    Attributes:
        package: the requirement whose version is shown.
        requirements: what is installed.
        environ: environment variables of its checks; None unsets one.
        unavailable: why it cannot run, if it cannot.
    """

    name: str
    package: str
    requirements: tuple[str, ...]
    checks: tuple[Check, ...]
    environ: dict[str, str | None] = field(default_factory=dict)
    unavailable: str | None = None


# Nothing may ask a hub, or tell anybody that it ran.
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "NO_COLOR": "1",
}

_CLIENTS = (
    Client(
        "openai",
        "openai",
        ("openai>=3.57", "pydantic>=2.12"),
        (
            Check("openai_chat"),
            Check("openai_completions"),
            Check("openai_chat", ("pair",)),
            Check("openai_completions", ("pair",)),
            Check("openai_limits", ("guarded",), ends_servers=True),
        ),
    ),
    Client(
        "langchain",
        "langchain-openai",
        ("langchain-openai>=1.7.4",),
        (Check("langchain_chat"),),
    ),
    Client(
        "tritonclient",
        "tritonclient",
        ("tritonclient[grpc]>=2.73",),
        (Check("triton_infer"), Check("triton_infer", ("pair",))),
    ),
    Client("kserve", "kserve", ("kserve>=0.21",), (Check("kserve_infer"),)),
    Client(
        "smg",
        "smg",
        ("smg>=1.13",),
        (
            Check("smg_router"),
            Check("smg_router", ("pair",)),
            Check("smg_disaggregated", ("prefill", "decode")),
        ),
    ),
    Client(
        "guidellm",
        "guidellm",
        # torch only cuts its data into batches: any build does, a CPU one is smaller.
        ("guidellm>=0.8.1", "torch==2.13.0"),
        (Check("guidellm_run"), Check("guidellm_run", ("pair",))),
    ),
    Client(
        "aiperf",
        "aiperf",
        ("aiperf>=0.13",),
        (Check("aiperf_profile"),),
        # With these set, it takes a folder's path for the name of a repository on the hub.
        environ={"HF_HUB_OFFLINE": None, "TRANSFORMERS_OFFLINE": None},
    ),
    Client(
        "lm-eval",
        "lm-eval",
        ("lm-eval[api]>=0.4.13", "transformers>=5.24"),
        (Check("lm_eval_task"),),
    ),
    Client(
        "vllm-htop",
        "vllm-htop",
        ("vllm-htop>=0.5",),
        (Check("vllm_htop"), Check("vllm_htop", ("pair",))),
    ),
    Client(
        "schemathesis",
        "schemathesis",
        ("schemathesis>=4.32.5",),
        (Check("schemathesis_openapi", ("short",), timeout_s=600.0),),
    ),
    Client(
        "structured",
        "jsonschema",
        ("httpx>=0.28", "jsonschema>=4.26"),
        (
            Check("structured_schemas", timeout_s=900.0),
            Check("structured_schemas", ("pair",), timeout_s=900.0),
        ),
    ),
)
CLIENTS: dict[str, Client] = {client.name: client for client in _CLIENTS}
