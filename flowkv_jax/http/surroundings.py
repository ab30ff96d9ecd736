"""What handlers get beside their request."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from flowkv_jax.config import ServerConfig
from flowkv_jax.rpc.auth import ApiKeys
from flowkv_jax.rpc.engine_protocol import ServingEngine
from flowkv_jax.rpc.live_requests import LiveRequests
from flowkv_jax.trace.recorder import Recorder


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """The same for all requests of a server.

    Attributes:
        live: where requests that generate are registered while they last
            (`rpc.answering` does it); shared with gRPC.
        api_keys: empty if none is needed.
        version: of flowkv.
        started_unix_s: when the server started; `created` of the model's card.
        on_engine_dead: called when a request met a dead engine.
        drain_server: begins to drain all front doors, and returns at once.
        clock: monotonic seconds.
        recorder: what the live page and the timeline show; None where the engine has no cluster to
            look at.
    """

    engine: ServingEngine
    config: ServerConfig
    live: LiveRequests
    api_keys: ApiKeys
    version: str
    started_unix_s: int
    on_engine_dead: Callable[[], None] = _nothing
    drain_server: Callable[[], None] = _nothing
    clock: Callable[[], float] = field(default=time.monotonic)
    recorder: Recorder | None = None
