"""What the controller can be told."""

from __future__ import annotations

import math

from flowkv_jax.config_section import Section
from flowkv_jax.controller.load_score import METRICS
from flowkv_jax.errors import ConfigError

# In the order of `load_score.METRICS`. A prefill node is loaded by what waits and by a full step,
# a decode node by the sequences it runs, the blocks they hold, and memory bandwidth.
_PREFILL_WEIGHTS = (0.05, 0.30, 0.05, 0.10, 0.25, 0.10, 0.15, 0.00)
_DECODE_WEIGHTS = (0.25, 0.15, 0.10, 0.00, 0.05, 0.25, 0.05, 0.15)


class ControllerConfig(Section, frozen=True, kw_only=True):
    """The controller: routing, roles of nodes, how many there are.

    Attributes:
        prefill_load_weights: eight weights of a prefill node's load, 0 or more with sum 1: running,
            waiting, swapped, sending, token budget, KV use, device use, memory bandwidth.
        decode_load_weights: the same of a decode node's load.
        load_window_s: reported metrics are averaged over this time.
        demand_window_s: prefill work that arrives is averaged over this time, to tell whether a
            role would do with a node less.
        role_load_low: load of a role at or under which it is idle.
        role_load_high: load of a role at or above which it is overloaded.
        role_load_hold_s: how long a role's load must stay on one side before its level changes.
        queue_target_s: predicted queue time at which a role's load counts as one half, whatever
            the other metrics say.
        decode_load_cost_s: transfer time that is worth as much as a decode node's whole load.
        local_prefill_max_tokens: a prompt of which no more than these tokens have to be computed
            may be prefilled on its decode node, without a hand-off; 0 never does. Each such prompt
            delays the tokens of others there, so a few hundred at most.
        expected_output_tokens: blocks are booked at a decode node for this many tokens to come, or
            for what the request allows, if less.
        default_prefill_tokens_per_s: of a node that has not been measured, at relative speed 1.
        attention_context_tokens: context at which prefill of a token costs twice that of the first.
        default_transfer_latency_s: of a hand-off, before any is measured.
        default_transfer_bytes_per_s: between nodes of one host, before a hand-off is measured.
        default_cross_host_bytes_per_s: the same between hosts.
        max_prefix_entries: blocks whose holders are remembered; the least recently used go first.
        max_logged_decisions: decisions that can still be asked for.
        policy_interval_s: one scheduling cycle of the policy.
        enable_role_switch: let an idle node take the overloaded role.
        role_switch_cycles: cycles a node keeps a role it was lent, at least.
        role_switch_cooldown_s: time between two changes of roles.
        role_drain_timeout_s: a node takes its new role after this time, even if work of the old one
            goes on there.
        enable_elastic_scaling: let the policy ask the launcher for nodes, and send nodes away.
        min_prefill_nodes, min_decode_nodes: never fewer, where scaling is on.
        max_prefill_nodes, max_decode_nodes: never more.
        scale_out_hold_s: how long overload must last before a node is added.
        scale_in_hold_s: how long idleness must last before one is removed.
        scale_cooldown_s: time between two changes of the number of nodes.
        node_launch_timeout_s: a node asked for is waited for this long.
    """

    prefill_load_weights: tuple[float, ...] = _PREFILL_WEIGHTS
    decode_load_weights: tuple[float, ...] = _DECODE_WEIGHTS
    load_window_s: float = 5.0
    demand_window_s: float = 30.0
    role_load_low: float = 0.25
    role_load_high: float = 0.60
    role_load_hold_s: float = 1.0
    queue_target_s: float = 1.0
    decode_load_cost_s: float = 0.25
    local_prefill_max_tokens: int = 0
    expected_output_tokens: int = 256
    default_prefill_tokens_per_s: float = 2000.0
    attention_context_tokens: int = 16384
    default_transfer_latency_s: float = 0.005
    default_transfer_bytes_per_s: float = 4e9
    default_cross_host_bytes_per_s: float = 1e9
    max_prefix_entries: int = 1 << 18
    max_logged_decisions: int = 1024
    policy_interval_s: float = 0.5
    enable_role_switch: bool = True
    role_switch_cycles: int = 20
    role_switch_cooldown_s: float = 10.0
    role_drain_timeout_s: float = 30.0
    enable_elastic_scaling: bool = False
    min_prefill_nodes: int = 1
    min_decode_nodes: int = 1
    max_prefill_nodes: int = 8
    max_decode_nodes: int = 8
    scale_out_hold_s: float = 10.0
    scale_in_hold_s: float = 60.0
    scale_cooldown_s: float = 30.0
    node_launch_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        for key in ("prefill_load_weights", "decode_load_weights"):
            _check_weights(key, getattr(self, key))
        self.require_positive(
            "load_window_s",
            "demand_window_s",
            "queue_target_s",
            "default_prefill_tokens_per_s",
            "attention_context_tokens",
            "default_transfer_bytes_per_s",
            "default_cross_host_bytes_per_s",
            "max_prefix_entries",
            "max_logged_decisions",
            "policy_interval_s",
            "role_switch_cycles",
            "max_prefill_nodes",
            "max_decode_nodes",
            "node_launch_timeout_s",
        )
        for key in (
            "role_load_hold_s",
            "decode_load_cost_s",
            "local_prefill_max_tokens",
            "expected_output_tokens",
            "default_transfer_latency_s",
            "role_switch_cooldown_s",
            "role_drain_timeout_s",
            "min_prefill_nodes",
            "min_decode_nodes",
            "scale_out_hold_s",
            "scale_in_hold_s",
            "scale_cooldown_s",
        ):
            _check_not_negative(key, getattr(self, key))
        if not 0 < self.role_load_low < self.role_load_high < 1:
            raise ConfigError(
                f"role_load_low={self.role_load_low} and role_load_high={self.role_load_high} must "
                "be in (0, 1), the first below the second",
                parameter="role_load_low",
                value=self.role_load_low,
            )
        for role in ("prefill", "decode"):
            low, high = getattr(self, f"min_{role}_nodes"), getattr(self, f"max_{role}_nodes")
            if low > high:
                raise ConfigError(
                    f"min_{role}_nodes={low} must be at most max_{role}_nodes={high}",
                    parameter=f"min_{role}_nodes",
                    value=low,
                )


def _check_weights(key: str, weights: tuple[float, ...]) -> None:
    if len(weights) != len(METRICS):
        raise ConfigError(
            f"{key}={weights} must have {len(METRICS)} entries: {', '.join(METRICS)}",
            parameter=key,
            value=weights,
        )
    if not all(0 <= w < math.inf for w in weights) or abs(sum(weights) - 1) > 1e-6:
        raise ConfigError(
            f"{key}={weights} must be 0 or more and have sum 1, not {sum(weights):g}",
            parameter=key,
            value=weights,
        )


def _check_not_negative(key: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ConfigError(
            f"{key}={value} must be finite and not negative", parameter=key, value=value
        )
