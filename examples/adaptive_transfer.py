"""Choose paths for KV transfers as the load of the links changes. Moves no bytes.

python examples/adaptive_transfer.py --mock     eight mock GPUs, loads set by hand
python examples/adaptive_transfer.py            this machine, loads as they are
"""

import argparse
import time
from statistics import median

from transfer import (
    MockNodeAgent,
    NodeAgent,
    PathSelector,
    PathType,
    SelectorConfig,
    Topology,
    TransferRequest,
)
from transfer.graph import LinkType

MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mock", action="store_true", help="mock GPUs and loads")
    parser.add_argument("--size-mb", type=int, default=64, metavar="N", help="MiB per transfer")
    args = parser.parse_args()
    if args.mock:
        mock(args.size_mb * MIB)
    else:
        this_machine(args.size_mb * MIB)


def mock(data_bytes: int) -> None:
    topo = Topology.make_mock_dgx(8)
    agent = MockNodeAgent(topo)
    cfg = SelectorConfig()
    cfg.relay_benefit_margin = 0.10  # A relay must beat the direct path by 10%.
    selector = PathSelector(topo, agent, cfg)
    gpus = topo.gpu_nodes()
    src, dst = gpus[0], gpus[7]
    bulk = TransferRequest(src=src, dst=dst, data_bytes=data_bytes)
    urgent = TransferRequest(src=src, dst=dst, data_bytes=data_bytes, ttft_sensitive=True)
    blocks = TransferRequest(src=src, dst=dst, data_bytes=data_bytes, block_bytes=MIB)

    print(f"{'GB/s to spare':<42}{'direct link':>14}{'chosen':>14}")

    def show(title: str, request: TransferRequest) -> None:
        decision = selector.select(request)
        direct = next(c for c in decision.candidates if c.path_type is PathType.DIRECT)
        spare = f"{direct.estimated_bandwidth:>14.1f}{decision.estimated_bandwidth:>14.1f}"
        routes = " + ".join(" > ".join(part.hops) for part in decision.chosen.parts)
        print(f"{title:<42}{spare}  {decision.chosen_type}: {routes}")
        print(f"    {decision.reason}")

    show("Idle", bulk)
    agent.set_utilization(src, dst, 0.85)
    show(f"{src} - {dst} 85% busy", bulk)
    agent.set_utilization(src, dst, 0.40)
    show(f"{src} - {dst} 40% busy", bulk)
    show(f"{src} - {dst} 40% busy, TTFT-sensitive", urgent)
    agent.set_all(0.50, LinkType.NVLINK)
    show("Every NVLink 50% busy, 1 MiB blocks", blocks)
    agent.set_all(0.97, LinkType.NVLINK)
    show("Every NVLink 97% busy", bulk)
    latency(selector, bulk)


def this_machine(data_bytes: int) -> None:
    topo = Topology().discover()
    places = topo.gpu_nodes()
    if len(places) < 2:
        places = [topo.add_process(name).name for name in ("prefill", "decode")]
    print(topo, *(f"  {node.name} ({node.node_type.value})" for node in topo.nodes), sep="\n")
    with NodeAgent(topo, sample_interval_ms=100) as agent:
        selector = PathSelector(topo, agent, SelectorConfig())
        time.sleep(0.3)  # Two samples, so that there is a rate.
        request = TransferRequest(src=places[0], dst=places[-1], data_bytes=data_bytes)
        print(selector.select(request))
        latency(selector, request)


def latency(selector: PathSelector, request: TransferRequest) -> None:
    samples_us = []
    for _ in range(2000):
        begin = time.perf_counter()
        selector.select(request)
        samples_us.append((time.perf_counter() - begin) * 1e6)
    samples_us.sort()
    p99 = samples_us[int(0.99 * len(samples_us))]
    print(f"Decision: median {median(samples_us):.1f} us, p99 {p99:.1f} us")


if __name__ == "__main__":
    main()
