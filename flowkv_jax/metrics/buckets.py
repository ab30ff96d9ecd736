"""Upper bounds of histogram buckets.

Those of `vllm:` metrics are vLLM's (v1/metrics/buckets.py, and its NIXL connector's), so that its
dashboards and alerts mean the same here.
"""

from __future__ import annotations

Bounds = tuple[float, ...]

REQUEST_LATENCY_S: Bounds = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TIME_TO_FIRST_TOKEN_S: Bounds = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
INTER_TOKEN_S: Bounds = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
STEP_TOKENS: Bounds = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
NUM_ANSWERS: Bounds = (1, 2, 5, 10, 20)
NUM_PREEMPTIONS: Bounds = (1, 2, 3, 4, 5, 10, 20)
TRANSFER_S: Bounds = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
TRANSFER_OVERHEAD_S: Bounds = (0.001, *TRANSFER_S)
TRANSFER_BYTES: Bounds = tuple(float(1 << power) for power in range(11, 35, 2))
NUM_DESCRIPTORS: Bounds = (
    *(10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10000, 20000, 50000),
)

# Ours: hand-offs within a host take milliseconds, and as a rule one call.
HANDOFF_S: Bounds = (
    *(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0),
)
NUM_CALLS: Bounds = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 1024, 4096)


def request_tokens(max_tokens: int) -> Bounds:
    """1, 2, 5, 10, .. up to `max_tokens`."""
    bounds: list[float] = []
    power = 1
    while True:
        for digit in (1, 2, 5):
            if digit * power > max_tokens:
                return tuple(bounds)
            bounds.append(digit * power)
        power *= 10


REQUEST_TOKENS: Bounds = request_tokens(10**7)
"""What is counted by; shown are those up to the longest context, as vLLM does."""
