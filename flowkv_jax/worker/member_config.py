"""How a worker behaves towards the front."""

from __future__ import annotations

from flowkv_jax.config_section import Section


class MemberConfig(Section, frozen=True, kw_only=True):
    """How a worker behaves towards the front.

    Attributes:
        join_timeout_s: how long to look for the front at first; None for ever.
        drain_timeout_s: how long running requests may finish after SIGTERM.
        front_timeout_s: silence after which the front counts as gone.
        dial_timeout_s: for one attempt to connect and join.
        first_backoff_s, max_backoff_s: pause between attempts; doubles from the first to the last.
    """

    join_timeout_s: float | None = 60.0
    drain_timeout_s: float = 30.0
    front_timeout_s: float = 15.0
    dial_timeout_s: float = 5.0
    first_backoff_s: float = 0.1
    max_backoff_s: float = 2.0

    def __post_init__(self) -> None:
        self.require_positive(
            "join_timeout_s",
            "front_timeout_s",
            "dial_timeout_s",
            "first_backoff_s",
            "max_backoff_s",
        )
