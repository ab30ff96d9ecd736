"""Workers that nobody starts again: they hang and come back, meet a new front, or are all gone."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from flowkv_jax import Client, Engine
from flowkv_jax.errors import DeadlineExceeded
from tests.cluster_fakes import wait_for
from tests.cluster_serve import Process
from tests.fault_cluster import (
    NUM_BLOCKS,
    Asked,
    FaultCluster,
    Streams,
    fault_front,
    fault_worker,
)
from tests.fault_rules import Action, FaultFolder, Rule

P, D = "prefill-0", "decode-0"
FAIL = "--kv-load-failure-policy=fail"
TWO_DEVICES = "--xla_force_host_platform_device_count=2"
PATIENCE_S = 1.0
SLOWLY = [Rule("step", Action.DELAY, count=0, seconds=0.03)]


@dataclass
class Joined:
    """Workers and a front that are started apart from each other."""

    model: Path
    folder: Path
    engine: Engine
    port: int
    workers: dict[str, tuple[tuple[str, ...], Process, ExitStack]] = field(default_factory=dict)
    fronts: ExitStack = field(default_factory=ExitStack)
    cluster: FaultCluster | None = None
    arguments: tuple[str, ...] = ()

    def front(self, *arguments: str) -> FaultCluster:
        """A server, where the workers look for it, with these arguments and no other."""
        cluster = self.cluster
        if (
            cluster is None
            or arguments != self.arguments
            or cluster.front.process.poll() is not None
        ):
            self.fronts.close()
            where = ("--workers=join", f"--cluster-port={self.port}")
            front = self.fronts.enter_context(
                fault_front(self.model, self.folder, *where, *arguments)
            )
            client = self.fronts.enter_context(Client(front.address))
            faults = FaultFolder(self.folder / "faults")
            cluster = self.cluster = FaultCluster(front, client, faults, self.engine)
            self.arguments = arguments
        return cluster

    def worker(self, name: str, *arguments: str, **more: str) -> Process:
        """A worker of this name that has these arguments."""
        known = self.workers.get(name)
        if known is None or known[0] != arguments or known[1].process.poll() is not None:
            self.stop(name)
            stack = ExitStack()
            where = f"127.0.0.1:{self.port}"
            process = stack.enter_context(
                fault_worker(self.model, self.folder, where, name, *arguments, **more)
            )
            self.workers[name] = arguments, process, stack
        return self.workers[name][1]

    def stop(self, name: str) -> None:
        """Kill a worker, if it runs."""
        if name in self.workers:
            self.workers.pop(name)[2].close()

    def close(self) -> None:
        for name in list(self.workers):
            self.stop(name)
        self.fronts.close()


@pytest.fixture(scope="module")
def joined(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Joined]:
    model, folder = tiny_model("gqa_tied"), tmp_path_factory.mktemp("joined")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    with Engine(str(model), max_num_seqs=8, max_model_len=1024, num_blocks=NUM_BLOCKS) as engine:
        made = Joined(model, folder, engine, port)
        try:
            yield made
        finally:
            made.close()


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        (P, Rule("sent:reserve", Action.STOP)),
        (P, Rule("submitted", Action.STOP)),
        (P, Rule("moved", Action.STOP)),
        (D, Rule("sent:granted", Action.STOP)),
        (D, Rule("receiving", Action.STOP)),
        (D, Rule("arrived", Action.STOP)),
        (D, Rule("say:token", Action.STOP, nth=5)),
    ],
    ids=lambda value: value if isinstance(value, str) else value.point.replace(":", "-"),
)
def test_a_worker_hangs_and_wakes_up(joined: Joined, name: str, rule: Rule) -> None:
    workers = {P: joined.worker(P), D: joined.worker(D)}
    cluster = joined.front()
    asked = Asked.new()
    cluster.wait_until_clean()
    before = cluster.epochs()
    cluster.order({name: [rule]})
    streams = Streams(cluster.client, asked)
    wait_for(lambda: cluster.fired() == {rule.point})
    # Its lease runs out, and the others go on.
    cluster.require_answers(streams, asked)
    # What comes in its place takes the blocks that were given up for it.
    more = Asked.new(lengths=(200, 500))
    cluster.require_answers(Streams(cluster.client, more), more)
    assert name not in cluster.epochs()
    again = Streams(cluster.client, more := Asked.new(num_tokens=200))
    wait_for(lambda: again.have_begun)
    workers[name].process.send_signal(signal.SIGCONT)
    cluster.require_answers(again, more)
    wait_for(lambda: cluster.epochs().get(name) == before[name] + 1, "it joins anew")
    cluster.wait_until_clean()
    more = Asked.new()
    cluster.require_answers(Streams(cluster.client, more), more)
    records = cluster.client.cluster.records(4)
    assert {(record.prefill_node, record.decode_node) for record in records} == {(P, D)}


def test_the_front_is_killed(joined: Joined) -> None:
    joined.worker(P)
    joined.worker(D)
    cluster = joined.front()
    cluster.wait_until_clean()
    before = cluster.epochs()
    cluster.order({D: SLOWLY})
    streams = Streams(cluster.client, Asked.new(num_tokens=400))
    wait_for(lambda: streams.have_begun)
    cluster.front.process.kill()
    streams.join()
    assert {status_of(error) for error in streams.errors} == {grpc.StatusCode.UNAVAILABLE}
    cluster = joined.front(FAIL)
    cluster.order({})
    cluster.wait_until_clean()
    assert cluster.epochs() == {name: epoch + 1 for name, epoch in before.items()}
    asked = Asked.new()
    cluster.require_answers(Streams(cluster.client, asked), asked)
    cluster.wait_until_clean()


def test_a_hand_off_that_fails_ends_the_request_if_wanted(joined: Joined) -> None:
    joined.worker(P)
    joined.worker(D)
    cluster = joined.front(FAIL)
    cluster.wait_until_clean()
    cluster.order({D: [Rule("receiving", Action.FAIL, count=0)]})
    streams = Streams(cluster.client, Asked.new())
    streams.join()
    for tokens, error in zip(streams.tokens, streams.errors, strict=True):
        assert len(tokens) == 1  # the prefill node has told it
        assert status_of(error) is grpc.StatusCode.INTERNAL
        assert "from prefill-0 to decode-0: " in str(error)
        assert "a fault that was ordered" in str(error)
        assert "kv_load_failure_policy=fail" in str(error)
    cluster.wait_until_clean()
    # A decode node that is lost is the same.
    cluster.order({D: [Rule("receiving")]})
    streams = Streams(cluster.client, Asked.new())
    streams.join()
    assert any("from prefill-0 to decode-0: " in str(error) for error in streams.errors)
    joined.worker(D)
    cluster.wait_until_clean()


def test_nodes_of_different_tensor_parallel_sizes(joined: Joined) -> None:
    joined.worker(P)
    joined.worker(D, "--tensor-parallel-size=2", XLA_FLAGS=TWO_DEVICES)
    cluster = joined.front()
    cluster.wait_until_clean()
    asked = Asked.new()
    cluster.require_answers(Streams(cluster.client, asked), asked)
    records = cluster.client.cluster.records(len(asked.prompts))
    assert all(record.handoff is not None for record in records), cluster.told
    cluster.wait_until_clean()


def test_calls_that_cut_blocks_do_not_fit_a_sharded_pool(joined: Joined) -> None:
    source = joined.worker(P, "--handoff-strategy=layer-major")
    joined.worker(D, "--tensor-parallel-size=2", XLA_FLAGS=TWO_DEVICES)
    cluster = joined.front()
    cluster.wait_until_clean()
    asked = Asked.new()
    cluster.require_answers(Streams(cluster.client, asked), asked)
    records = cluster.client.cluster.records(len(asked.prompts))
    assert all(record.decode_node == P for record in records), cluster.told
    source.said("hand-off of .* to decode-0: .*a sharded or device pool moves whole blocks only")
    cluster.wait_until_clean()


def test_no_worker_is_left(joined: Joined) -> None:
    joined.worker(P)
    joined.worker(D)
    cluster = joined.front(f"--start-timeout-s={PATIENCE_S}")
    cluster.wait_until_clean()
    asked = Asked.new(num_tokens=400)
    cluster.order({D: SLOWLY})
    streams = Streams(cluster.client, asked)
    wait_for(lambda: streams.have_begun)
    joined.stop(P)
    joined.stop(D)
    cluster.order({})
    late = Streams(cluster.client, Asked.new(), timeout=0.2)
    late.join()
    assert all(isinstance(error, DeadlineExceeded) for error in late.errors), late.errors
    streams.join()  # they wait, but not for ever
    assert {status_of(error) for error in streams.errors} == {grpc.StatusCode.UNAVAILABLE}
    assert all("no worker has been there" in str(error) for error in streams.errors)
    streams = Streams(cluster.client, Asked.new())
    streams.join()
    assert {status_of(error) for error in streams.errors} == {grpc.StatusCode.UNAVAILABLE}
    joined.worker(P)
    joined.worker(D)
    cluster.wait_until_clean()
    cluster.require_answers(Streams(cluster.client, asked), asked)


def status_of(error: Exception | None) -> grpc.StatusCode | None:
    cause = None if error is None else error.__cause__
    return cause.code() if isinstance(cause, grpc.Call) else None
