"""Other systems move the runs that `flowkv bench transfer` moves: NIXL, Mooncake's transfer engine.

    NAME'S-PYTHON benchmarks/transfer_peers.py nixl|mooncake < task.json

For `flowkv bench transfer --peer NAME=PYTHON`. Runs in the other system's environment and needs
that system and NumPy, nothing of this project. Two processes, memory to memory, the first reads
from the second. NIXL as installed, with its UCX backend (UCX's settings are the environment's);
Mooncake with its TCP transport.

Standard input is one object: `block_bytes`, `num_blocks` of either pool, `repeat`, `cold`, and
`cases`, by name a list of (source block, destination block, blocks). Standard output is one object:
`version` and `seconds`, by case those of every repetition. What is timed is the transfer alone,
from posting it until it is known to be done; descriptors are made before, and if `cold`, 64 MiB are
changed elsewhere, as is done before ours. Bytes are compared.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import multiprocessing
import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

WARMUP = 3
SWEEP_BYTES = 64 << 20
START_S, SEED = 60, 7
PACKAGES = {
    "nixl": ("nixl-cu12", "nixl-cu13", "nixl"),
    "mooncake": ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine"),
}


def contents(size: int) -> np.ndarray:
    return np.random.default_rng(SEED).integers(0, 256, size, np.uint8)


def end_with_parent() -> None:
    """Linux: be killed when the process that started us ends, however it ends."""
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


class Nixl:
    """Reads by NIXL's Python API."""

    def __init__(self, pool: np.ndarray, name: str) -> None:
        try:
            from nixl_cu12._api import nixl_agent, nixl_agent_config
        except ImportError:
            from nixl._api import nixl_agent, nixl_agent_config
        self.agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
        self.agent.register_memory([(pool.ctypes.data, pool.nbytes, 0, "")], "DRAM")
        self.remote = ""

    def introduction(self) -> Any:
        return self.agent.get_agent_metadata()

    def meet(self, introduction: Any) -> None:
        name = self.agent.add_remote_agent(introduction)
        self.remote = name.decode() if isinstance(name, bytes) else name

    def prepare(self, here: list[int], there: list[int], sizes: list[int]) -> Any:
        local, remote = (
            self.agent.get_xfer_descs([(a, n, 0) for a, n in zip(side, sizes, strict=True)], "DRAM")
            for side in (here, there)
        )
        return self.agent.initialize_xfer("READ", local, remote, self.remote)

    def read(self, prepared: Any) -> None:
        state = self.agent.transfer(prepared)
        while state != "DONE":
            if state == "ERR":
                raise RuntimeError("the transfer failed")
            state = self.agent.check_xfer_state(prepared)

    def release(self, prepared: Any) -> None:
        self.agent.release_xfer_handle(prepared)


class Mooncake:
    """Reads by Mooncake's Python API."""

    def __init__(self, pool: np.ndarray, name: str) -> None:
        from mooncake.engine import TransferEngine

        self.engine = TransferEngine()
        host = "127.0.0.1"
        if self.engine.initialize(host, "P2PHANDSHAKE", "tcp", "") != 0:
            raise RuntimeError("Mooncake's engine does not start")
        if self.engine.register_memory(pool.ctypes.data, pool.nbytes) != 0:
            raise RuntimeError("Mooncake does not take the memory")
        self.address = f"{host}:{self.engine.get_rpc_port()}"
        self.remote = ""

    def introduction(self) -> Any:
        return self.address

    def meet(self, introduction: Any) -> None:
        self.remote = introduction

    def prepare(self, here: list[int], there: list[int], sizes: list[int]) -> Any:
        return here, there, sizes

    def read(self, prepared: Any) -> None:
        here, there, sizes = prepared
        if len(here) == 1:
            status = self.engine.transfer_sync_read(self.remote, here[0], there[0], sizes[0])
        else:
            status = self.engine.batch_transfer_sync_read(self.remote, here, there, sizes)
        if status != 0:
            raise RuntimeError(f"the transfer failed: {status}")

    def release(self, prepared: Any) -> None:
        pass


SYSTEMS = {"nixl": Nixl, "mooncake": Mooncake}


def serve(name: str, size: int, pipe: Connection) -> None:
    """The second process: its memory is read."""
    end_with_parent()
    pool = contents(size)
    system = SYSTEMS[name](pool, "source")
    pipe.send((system.introduction(), pool.ctypes.data))
    pipe.recv()
    # Mooncake's threads do not end by themselves.
    os._exit(0)


def measure(name: str, task: dict[str, Any], pipe: Connection) -> dict[str, list[float]]:
    block = task["block_bytes"]
    pool = np.zeros(task["num_blocks"] * block, np.uint8)
    elsewhere = np.zeros(SWEEP_BYTES if task["cold"] else 0, np.uint8)
    expected = contents(pool.nbytes)
    system = SYSTEMS[name](pool, "destination")
    if not pipe.poll(START_S):
        raise RuntimeError(f"the second process said nothing within {START_S} s")
    introduction, base = pipe.recv()
    system.meet(introduction)
    seconds: dict[str, list[float]] = {}
    for case, runs in task["cases"].items():
        here = [pool.ctypes.data + dst * block for _, dst, _ in runs]
        there = [base + src * block for src, _, _ in runs]
        sizes = [count * block for _, _, count in runs]
        pool[:] = 0
        times = []
        for _ in range(WARMUP + task["repeat"]):
            prepared = system.prepare(here, there, sizes)
            elsewhere += 1
            begin = time.perf_counter()
            system.read(prepared)
            times.append(time.perf_counter() - begin)
            system.release(prepared)
        for src, dst, count in runs:
            got = pool[dst * block : (dst + count) * block]
            if not np.array_equal(got, expected[src * block : (src + count) * block]):
                raise RuntimeError(f"{case}: wrong bytes arrived")
        seconds[case] = times[WARMUP:]
    return seconds


def version(name: str) -> str:
    for package in PACKAGES[name]:
        try:
            return f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"{name}, unknown version"


def main(name: str) -> None:
    # What the systems print goes to standard error; the answer alone to standard output.
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    end_with_parent()
    task = json.load(sys.stdin)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    size = task["num_blocks"] * task["block_bytes"]
    process = context.Process(target=serve, args=(name, size, theirs), daemon=True)
    process.start()
    seconds = measure(name, task, ours)
    ours.send("end")
    process.join(START_S)
    json.dump({"version": version(name), "seconds": seconds}, answer)
    answer.close()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in SYSTEMS:
        sys.exit(f"usage: {sys.argv[0]} {'|'.join(SYSTEMS)} < task.json")
    main(sys.argv[1])
