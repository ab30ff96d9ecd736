"""What the path selector can be told."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from transfer.graph import LinkType

# What a link may be loaded to is decided by where it leads.
_THRESHOLD_OF = {
    LinkType.NVLINK: "nvlink_util_threshold",
    LinkType.RDMA: "rdma_util_threshold",
    LinkType.TCP: "rdma_util_threshold",
    LinkType.PCIE: "cnic_util_threshold",
    LinkType.CNIC: "cnic_util_threshold",
    LinkType.SHARED_MEMORY: "cnic_util_threshold",
    LinkType.SNIC: "snic_util_threshold",
}


@dataclass
class SelectorConfig:
    """Weights, thresholds and margins; attributes may be set at any time and are checked then.

    A running selector sees a changed value at its next decision.

    Attributes:
        w_bandwidth, w_queue_delay, w_hops, w_qos_risk, w_latency: weights of the score's terms,
            0 or more; see `transfer.path_scoring`.
        nvlink_util_threshold: utilisation above which a path over such a link is rejected; in
            (0, 1]. GPU to GPU.
        rdma_util_threshold: the same between hosts, RDMA or TCP.
        cnic_util_threshold: the same towards a compute interface, and on PCIe and shared memory.
        snic_util_threshold: the same towards storage.
        relay_benefit_margin: by how much, as a share, a relay must beat the direct path.
        enable_split_path: whether one transfer may take several paths at once.
        max_split_paths: how many at most; at least 2.
        split_benefit_margin: share of the single path's time that a split must save; in [0, 1).
        min_split_ms: predicted time of the single path under which a request stays whole, as
            a second call would cost more than it saves.
        switch_margin: score by which a relay must beat the one in use to replace it.
        in_flight_s: how long a transfer that was chosen counts as load on its links, unless it is
            observed to have ended; some intervals of the agent, after which its samples show it.
            0 counts none.
        ttft_budget_ms: transfer time at which the latency term is one half.
        observation_weight: weight of the newest transfer in the average that corrects a path's
            nominal bandwidth; in [0, 1], and 0 is never to correct.
        probe_interval_s: how long a path that was corrected downwards may stay untried.
    """

    w_bandwidth: float = 1.0
    w_queue_delay: float = 0.5
    w_hops: float = 0.2
    w_qos_risk: float = 0.3
    w_latency: float = 0.5
    nvlink_util_threshold: float = 0.80
    rdma_util_threshold: float = 0.80
    cnic_util_threshold: float = 0.70
    snic_util_threshold: float = 0.85
    relay_benefit_margin: float = 0.10
    enable_split_path: bool = True
    max_split_paths: int = 2
    split_benefit_margin: float = 0.15
    min_split_ms: float = 2.0
    switch_margin: float = 0.05
    in_flight_s: float = 0.3
    ttft_budget_ms: float = 10.0
    observation_weight: float = 0.25
    probe_interval_s: float = 5.0

    def __setattr__(self, name: str, value: Any) -> None:
        known = {field.name for field in fields(self)}
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise AttributeError(f"SelectorConfig has no {name!r}{hint}")
        _check(name, value)
        super().__setattr__(name, value)
        self.__dict__["_revision"] = self.revision + 1

    @property
    def revision(self) -> int:
        """Changes whenever an attribute is set."""
        revision: int = self.__dict__.get("_revision", 0)
        return revision

    def threshold(self, link_type: LinkType) -> float:
        """Utilisation above which a link of this type must not be used."""
        value: float = getattr(self, _THRESHOLD_OF[link_type])
        return value


def _check(name: str, value: Any) -> None:
    if name == "enable_split_path":
        if not isinstance(value, bool):
            raise ValueError(f"{name}={value!r} must be True or False")
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name}={value!r} must be a finite number")
    if name == "max_split_paths":
        if not isinstance(value, int) or value < 2:
            raise ValueError(
                f"{name}={value!r} must be a whole number from 2 up; "
                "set enable_split_path=False for no splits"
            )
    elif name.endswith("_threshold"):
        if not 0 < value <= 1:
            raise ValueError(f"{name}={value!r} must be in (0, 1]")
    elif name == "split_benefit_margin":
        if not 0 <= value < 1:
            raise ValueError(f"{name}={value!r} must be in [0, 1)")
    elif name == "observation_weight":
        if not 0 <= value <= 1:
            raise ValueError(f"{name}={value!r} must be in [0, 1]")
    elif name == "ttft_budget_ms":
        if value <= 0:
            raise ValueError(f"{name}={value!r} must be above 0")
    elif value < 0:
        raise ValueError(f"{name}={value!r} must not be negative")
