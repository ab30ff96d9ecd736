"""Configuration: a few frozen structures, joined once in `EngineConfig`, or `ServeConfig`.

Field names are vLLM's where the meaning is equal, and unique across the structures, so a flat
keyword (`Engine(max_num_seqs=8)`) or flag (`--max-num-seqs 8`) finds its place without a prefix.
Nothing edits a configuration after start; derived values are computed where they are used.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import yaml

from flowkv_jax.cluster.config import ClusterConfig
from flowkv_jax.config_section import Section
from flowkv_jax.controller.config import ControllerConfig
from flowkv_jax.controller.role import Role
from flowkv_jax.errors import ConfigError
from flowkv_jax.kv_transfer.config import KVTransferConfig

DEFAULT_MODEL = "smollm2-135m-instruct"

DType = Literal["auto", "float32", "bfloat16", "float16"]
SchedulingPolicy = Literal["fcfs", "priority"]
PreemptionMode = Literal["auto", "swap", "recompute"]
FailurePolicy = Literal["recompute", "fail"]
HandoffBackend = Literal["shared_memory", "tcp", "jax_pull", "nixl"]
HandoffStrategy = Literal["aligned-runs", "block-major", "layer-major"]
ToolCallParserName = Literal["hermes", "llama3_json"]
AttentionImplementation = Literal["auto", "reference", "xla", "cpu", "gpu", "hopper"]

_MAX_INT32 = 2**31 - 1
_MAX_NODES = 1024
_MAX_BLOCK_SIZE = 1 << 16
_MAX_BYTES = 1 << 50


class ModelConfig(Section, frozen=True, kw_only=True):
    """Which model, and how it is read.

    Attributes:
        model: a known name (`flowkv pull --list`), a GGUF file, or a Hugging Face folder.
        served_model_name: name shown to clients; None takes the last part of `model`.
        dtype: of weights and KV cache; auto is float32 on CPU and bfloat16 on GPU.
        max_model_len: prompt plus output, in tokens; None takes the model's own limit.
        seed: base of the seeds of requests that bring none.
        chat_template: a file with a Jinja template that replaces the model's own.
    """

    model: str = DEFAULT_MODEL
    served_model_name: str | None = None
    dtype: DType = "auto"
    max_model_len: int | None = None
    seed: int = 0
    chat_template: str | None = None

    def __post_init__(self) -> None:
        self.require_positive("max_model_len")
        if not -(2**63) <= self.seed < 2**63:
            raise ConfigError(
                f"seed={self.seed} must fit 64 bits", parameter="seed", value=self.seed
            )


class CacheConfig(Section, frozen=True, kw_only=True):
    """The KV pool.

    Attributes:
        block_size: tokens in a block.
        num_blocks: blocks in the pool; None derives it from `kv_cache_memory_bytes`.
        kv_cache_memory_bytes: size of the pool; None takes room for `max_num_seqs` requests of
            2,048 tokens on CPU (at most a quarter of the free memory), and
            `gpu_memory_utilization` of the memory on a GPU.
        gpu_memory_utilization: share of device memory for weights and pool together.
        swap_space_bytes: host memory for preempted requests; 0 turns swapping off.
        enable_prefix_caching: reuse the blocks of equal prompt beginnings.
    """

    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    swap_space_bytes: int = 256 << 20
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        self.require_positive("block_size", "num_blocks", "kv_cache_memory_bytes")
        self.require_at_most(
            block_size=_MAX_BLOCK_SIZE,
            num_blocks=_MAX_INT32,
            kv_cache_memory_bytes=_MAX_BYTES,
            swap_space_bytes=_MAX_BYTES,
        )
        if self.swap_space_bytes < 0:
            raise ConfigError(
                f"swap_space_bytes={self.swap_space_bytes} must not be negative",
                parameter="swap_space_bytes",
                value=self.swap_space_bytes,
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization={self.gpu_memory_utilization} must be in (0, 1]",
                parameter="gpu_memory_utilization",
                value=self.gpu_memory_utilization,
            )


class SchedulerConfig(Section, frozen=True, kw_only=True):
    """Who runs when.

    Attributes:
        max_num_seqs: sequences decoded in one step.
        max_num_batched_tokens: token budget of a step; longer prompts are prefilled in chunks. The
            default has room for 1,024 prompt tokens beside 32 decodes.
        max_waiting_requests: queue bound; one more is refused.
        max_waiting_tokens: bound on queued prompt tokens; None for no bound.
        scheduling_policy: fcfs, or priority (lower first, then arrival).
        preemption_mode: auto swaps when there is room in the swap space, else recomputes.
        request_timeout_s: a deadline for requests that bring none; None for none.
    """

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 1056
    max_waiting_requests: int = 1024
    max_waiting_tokens: int | None = None
    scheduling_policy: SchedulingPolicy = "fcfs"
    preemption_mode: PreemptionMode = "auto"
    request_timeout_s: float | None = None

    def __post_init__(self) -> None:
        self.require_positive(
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_waiting_requests",
            "max_waiting_tokens",
            "request_timeout_s",
        )
        self.require_at_most(
            max_num_seqs=_MAX_INT32,
            max_num_batched_tokens=_MAX_INT32,
            max_waiting_requests=_MAX_INT32,
        )


class RuntimeConfig(Section, frozen=True, kw_only=True):
    """How the device is used.

    Attributes:
        tensor_parallel_size: devices one model replica is spread over.
        attention_implementation: auto, or exactly one: cpu (kernels in place, CPU only), gpu
            (Pallas through Triton), hopper (decode through Mosaic GPU; both are interpreted, and
            slow, without a GPU), xla (no kernel), reference (slow; for checking).
        compilation_cache_dir: where compiled programs are kept between starts; None takes the
            cache folder (`FLOWKV_CACHE_DIR`), an empty string turns it off.
        enable_overlap: schedule step n+1 while step n runs.
        max_logprobs: most alternatives a request may ask for at a position; -1 for no bound.
        profile_dir: where `/start_profile` of the admin port writes JAX profiles, a folder a node;
            None refuses it.
        debug: check every step's block tables before it runs and the cache's books after it.
    """

    tensor_parallel_size: int = 1
    attention_implementation: AttentionImplementation = "auto"
    compilation_cache_dir: str | None = None
    enable_overlap: bool = True
    max_logprobs: int = 20
    profile_dir: str | None = None
    debug: bool = False

    def __post_init__(self) -> None:
        self.require_positive("tensor_parallel_size")
        if self.max_logprobs < -1:
            raise ConfigError(
                f"max_logprobs={self.max_logprobs} must be at least -1 (no bound)",
                parameter="max_logprobs",
                value=self.max_logprobs,
            )


class NodesConfig(Section, frozen=True, kw_only=True):
    """How many nodes serve the model, and in which roles at the start.

    Attributes:
        prefill_nodes: nodes that compute prompts and hand them off.
        decode_nodes: nodes that take prompts over and decode.
        hybrid_nodes: nodes that do both; None means none where there are prefill and decode nodes,
            else 1.
    """

    prefill_nodes: int = 0
    decode_nodes: int = 0
    hybrid_nodes: int | None = None

    def __post_init__(self) -> None:
        for key in ("prefill_nodes", "decode_nodes", "hybrid_nodes"):
            value = getattr(self, key)
            if value is not None and value < 0:
                raise ConfigError(f"{key}={value} must not be negative", parameter=key, value=value)
        self.require_at_most(prefill_nodes=_MAX_NODES, decode_nodes=_MAX_NODES)
        if self.hybrid_nodes == 0 and not (self.prefill_nodes and self.decode_nodes):
            raise ConfigError(
                "without hybrid_nodes there must be at least one of prefill_nodes and one of "
                "decode_nodes",
                parameter="hybrid_nodes",
                value=0,
            )

    @property
    def roles(self) -> list[Role]:
        """One entry a node."""
        hybrid = self.hybrid_nodes
        if hybrid is None:
            hybrid = 0 if self.prefill_nodes and self.decode_nodes else 1
        return (
            [Role.PREFILL] * self.prefill_nodes
            + [Role.DECODE] * self.decode_nodes
            + [Role.HYBRID] * hybrid
        )

    @property
    def num_decoding(self) -> int:
        """Nodes that decode."""
        return sum(role is not Role.PREFILL for role in self.roles)


class HandoffConfig(Section, frozen=True, kw_only=True):
    """How a prompt's KV cache moves from its prefill node to its decode node.

    Attributes:
        kv_load_failure_policy: what becomes of a request whose cache could not be moved: recompute
            (another node, another path, or computed again: the answer goes on), or fail.
        handoff_strategy: grain of the calls: aligned-runs (one call a run that is contiguous on
            both sides), block-major (one a block), layer-major (one a block, layer and K or V).
            The last two are there to be compared with.
        handoff_backend: name of the transfer backend to use; None takes the best that both have.
        handoff_links: YAML file with the links between the nodes, by their names, as
            configs/links_dgx8.yaml; paths are then chosen by the links' load, and split, relayed
            or stored on the way where that is better. None takes the direct path.
        verify_handoffs: compare checksums of all blocks before a hand-off is acknowledged.
        handoff_wait_s: how long a prefill node waits for room on the decode node before it asks
            for another.
        handoff_timeout_s: bound on one transfer.
    """

    kv_load_failure_policy: FailurePolicy = "recompute"
    handoff_strategy: HandoffStrategy = "aligned-runs"
    handoff_backend: HandoffBackend | None = None
    handoff_links: str | None = None
    verify_handoffs: bool = False
    handoff_wait_s: float = 10.0
    handoff_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        self.require_positive("handoff_wait_s", "handoff_timeout_s")


class EngineConfig(Section, frozen=True, kw_only=True):
    """Everything an `Engine` needs."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    nodes: NodesConfig = NodesConfig()
    handoff: HandoffConfig = HandoffConfig()
    controller: ControllerConfig = ControllerConfig()
    kv_transfer: KVTransferConfig = KVTransferConfig()

    def __post_init__(self) -> None:
        if self.kv_transfer.computes_for_others and not self.cache.enable_prefix_caching:
            raise ConfigError(
                f"kv_role={self.kv_transfer.kv_role} needs enable_prefix_caching: prompts are kept "
                "for other servers in the prefix cache",
                parameter="kv_role",
                value=self.kv_transfer.kv_role,
            )


class ServerConfig(Section, frozen=True, kw_only=True):
    """The front doors: HTTP (OpenAI's API, metrics, the live page) and gRPC.

    Attributes:
        host: where HTTP and gRPC listen.
        port: of HTTP; 0 takes a free one, None serves no HTTP.
        grpc_port: of gRPC; 0 takes a free one.
        admin_port: of the HTTP calls that steer the server (roles, drain, cache, abort, profile);
            None, the default, serves none of them.
        admin_host: where these listen. Beyond loopback they need keys or client certificates; the
            keys are those of the API.
        ssl_certfile: PEM file with the server's certificate; with ssl_keyfile it turns TLS on.
        ssl_keyfile: PEM file with its private key.
        ssl_ca_certs: PEM file of client authorities; turns mutual TLS on.
        api_key_file: file with bearer tokens, one a line; the environment variable
            FLOWKV_API_KEY adds one more.
        allow_insecure_bind: permit a non-loopback address without TLS or token.
        max_message_bytes: largest gRPC message accepted.
        max_body_bytes: largest body of an HTTP request.
        max_header_bytes: largest head of an HTTP request.
        max_header_count: most headers in it.
        header_timeout_s: within which the head of an HTTP request must arrive.
        body_timeout_s: within which its body must arrive.
        write_timeout_s: how long a client may read nothing of an answer that waits for it.
        keep_alive_timeout_s: how long a connection without a request is kept.
        tool_call_parser: how the model writes tool calls; None looks at its chat template.
        enable_prompt_tokens_details: usage tells how many prompt tokens were cached. That another
            has sent the same beginning can be seen from it.
        sse_keep_alive_s: silence after which a stream of events sends a comment.
        drain_timeout_s: how long running requests may finish after SIGTERM.
        stream_interval_ms: tokens of one stream that arrive within this time share a message.
        enable_reflection: answer gRPC reflection; None means on loopback only.
        enable_admin: callers may change roles of nodes and drain them; None means on loopback only.
        otlp_traces_endpoint: collector of OpenTelemetry traces (OTLP over gRPC), such as
            http://127.0.0.1:4317; needs the extra `otel`. None sends none.
    """

    host: str = "127.0.0.1"
    port: int | None = 8000
    grpc_port: int = 50051
    admin_port: int | None = None
    admin_host: str = "127.0.0.1"
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None
    api_key_file: str | None = None
    allow_insecure_bind: bool = False
    max_message_bytes: int = 64 << 20
    max_body_bytes: int = 8 << 20
    max_header_bytes: int = 64 << 10
    max_header_count: int = 128
    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    write_timeout_s: float = 60.0
    keep_alive_timeout_s: float = 15.0
    tool_call_parser: ToolCallParserName | None = None
    enable_prompt_tokens_details: bool = False
    sse_keep_alive_s: float = 15.0
    drain_timeout_s: float = 30.0
    stream_interval_ms: float = 5.0
    enable_reflection: bool | None = None
    enable_admin: bool | None = None
    otlp_traces_endpoint: str | None = None


class ServeConfig(Section, frozen=True, kw_only=True):
    """Everything `flowkv serve` needs."""

    engine: EngineConfig = EngineConfig()
    server: ServerConfig = ServerConfig()
    cluster: ClusterConfig = ClusterConfig()

    @property
    def has_workers(self) -> bool:
        """Nodes are processes of their own."""
        workers = self.cluster.workers
        if workers == "auto":
            return len(self.engine.nodes.roles) > 1
        return workers != "none"


_ConfigT = TypeVar("_ConfigT", EngineConfig, ServeConfig)


def cache_dir() -> Path:
    """Folder of models and compiled programs: FLOWKV_CACHE_DIR, or in the user's cache folder."""
    override = os.environ.get("FLOWKV_CACHE_DIR")
    if override:
        return Path(override).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "flowkv"


def flat_fields(config_type: type[Section]) -> dict[str, tuple[tuple[str, ...], Any]]:
    """Every leaf field of a configuration type: name -> (path of section names, type)."""
    fields: dict[str, tuple[tuple[str, ...], Any]] = {}
    for name, hint in get_type_hints(config_type).items():
        if isinstance(hint, type) and issubclass(hint, Section):
            for leaf, (path, leaf_hint) in flat_fields(hint).items():
                fields[leaf] = ((name, *path), leaf_hint)
        else:
            fields[name] = ((), hint)
    return fields


def load_config(
    config_type: type[_ConfigT],
    path: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    base: _ConfigT | None = None,
) -> _ConfigT:
    """Build a configuration from a base or the defaults, a YAML file, and flat overrides.

    Later ones win.

    The file may be nested by section or flat: `scheduler: {max_num_seqs: 8}` and
    `max_num_seqs: 8` mean the same.

    Raises:
        ConfigError: unknown key (named, with the file), wrong type, value out of range.
    """
    tree: dict[str, Any] = {} if base is None else msgspec.to_builtins(base)
    if path is not None:
        _merge_document(config_type, tree, _read_yaml(Path(path)), str(path))
    _merge_flat(config_type, tree, overrides or {}, "arguments")
    try:
        return msgspec.convert(tree, type=config_type)
    except msgspec.ValidationError as error:
        where = f"{path}: " if path is not None else ""
        cause = error.__cause__
        if isinstance(cause, ConfigError):
            raise ConfigError(
                f"{where}{cause}", parameter=cause.parameter, value=cause.value
            ) from error
        raise ConfigError(f"{where}{error}") from error


def _read_yaml(path: Path) -> Mapping[str, Any]:
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read configuration: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: no date, no UTF-8
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: expected a mapping of keys at the top, got {document!r:.100}")
    return document


def _merge_document(
    config_type: type[Section], tree: dict[str, Any], document: Mapping[str, Any], source: str
) -> None:
    """Put a nested or flat document into `tree`, checking every key."""
    sections = _sections(config_type)
    flat: dict[str, Any] = {}
    for key, value in document.items():
        if not isinstance(key, str):
            raise ConfigError(f"{source}: key {key!r:.100} is no text")
        # `model` names a section and, as a string, a field: a mapping is the section.
        if key in sections and isinstance(value, dict):
            path, section = sections[key]
            branch = tree
            for name in path:
                branch = branch.setdefault(name, {})
            _merge_document(section, branch, value, f"{source}: {key}")
        elif key in sections and (value is None or key not in flat_fields(config_type)):
            if value is not None:
                raise ConfigError(
                    f"{source}: {key} is a section; expected a mapping of keys, got {value!r:.100}",
                    parameter=key,
                    value=value,
                )
        else:
            flat[key] = value
    _merge_flat(config_type, tree, flat, source)


def _sections(
    config_type: type[Section],
) -> dict[str, tuple[tuple[str, ...], type[Section]]]:
    """Every section at any depth: name -> (path to it, type). A file may leave outer ones out."""
    found: dict[str, tuple[tuple[str, ...], type[Section]]] = {}
    for name, hint in get_type_hints(config_type).items():
        if isinstance(hint, type) and issubclass(hint, Section):
            found[name] = ((name,), hint)
            for inner, (path, section) in _sections(hint).items():
                found[inner] = ((name, *path), section)
    return found


def _merge_flat(
    config_type: type[Section], tree: dict[str, Any], values: Mapping[str, Any], source: str
) -> None:
    known = flat_fields(config_type)
    for key, value in values.items():
        if key not in known:
            raise ConfigError(
                f"{source}: unknown key {key!r}{_suggestion(key, known)}",
                parameter=key,
                value=value,
            )
        section = tree
        for name in known[key][0]:
            section = section.setdefault(name, {})
        section[key] = value


def _suggestion(key: str, known: Mapping[str, Any]) -> str:
    import difflib

    close = difflib.get_close_matches(key, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def choices(hint: Any) -> tuple[str, ...] | None:
    """The values of a Literal type, or None for any other type."""
    return get_args(hint) if get_origin(hint) is Literal else None
