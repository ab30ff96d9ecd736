"""A front that writes down what it hears, and a node that counts instead of computing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from flowkv_jax.cluster.facts import ModelFacts, NodeFacts
from flowkv_jax.cluster.messages import ErrandKind, Peer
from flowkv_jax.cluster.node_port import Deliver, SequenceKey, StopOrder
from flowkv_jax.cluster.remote_node import RemoteNode
from flowkv_jax.cluster.roster import Member as RosterMember
from flowkv_jax.controller.role import Role
from flowkv_jax.controller.snapshot import NodeReport
from flowkv_jax.errors import DuplicateRequestError
from flowkv_jax.load import NodeLoad
from flowkv_jax.sampling_params import SamplingParams
from flowkv_jax.sequence import SequenceSpec, SequenceUpdate
from flowkv_jax.worker.application import Application
from pallas_kernels.kv_layout import KVLayout

VERSION = "1.2.3"
SECRET = b"between us"
PATIENCE_S = 60.0


def wait_for(condition: Callable[[], Any], what: str = "") -> Any:
    """The first true value of `condition`; fails when it stays false for very long."""
    ends_s = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < ends_s, f"never came: {what or condition}"
        time.sleep(0.005)
    return value


def model_facts(**layout: Any) -> ModelFacts:
    sizes: dict[str, Any] = {
        "num_layers": 2,
        "block_size": 16,
        "num_kv_heads": 2,
        "head_dim": 8,
        "dtype": "float32",
        "dtype_bytes": 4,
    }
    return ModelFacts(
        architecture="llama",
        config_digest="c0",
        weights_digest="w0",
        layout=KVLayout(**(sizes | layout)),
    )


def node_facts(**changes: Any) -> NodeFacts:
    facts: dict[str, Any] = {
        "num_blocks": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 128,
        "max_request_tokens": 1024,
        "transfer_address": ("127.0.0.1", 1),
    }
    return NodeFacts(**(facts | changes))


def application(role: Role = Role.HYBRID, **changes: Any) -> Application:
    told: dict[str, Any] = {
        "version": VERSION,
        "role": role,
        "model": model_facts(),
        "node": node_facts(),
    }
    return Application(**(told | changes))


def spec(sequence_id: str = "s", num_prompt: int = 3, total: int = 8, **more: Any) -> SequenceSpec:
    values: dict[str, Any] = {
        "sequence_id": sequence_id,
        "prompt_token_ids": list(range(num_prompt)),
        "sampling_params": SamplingParams(max_tokens=total - num_prompt),
        "seed": 7,
        "max_total_tokens": total,
        "arrival_s": time.monotonic(),
    }
    return SequenceSpec(**(values | more))


def load(running: int = 0) -> NodeLoad:
    return NodeLoad(
        num_requests_running=running,
        num_requests_waiting=0,
        num_requests_swapped=0,
        num_waiting_tokens=0,
        kv_cache_usage=0.0,
        num_blocks=64,
        num_free_blocks=64,
        fragmentation=0.0,
        prefix_cache_queries=0,
        prefix_cache_hits=0,
        num_preemptions=0,
        token_budget_used=0.0,
    )


class RecordingListener:
    """Writes down all events; answers `deliver` with what `orders` holds for the node."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.events: list[tuple[str, str, int | str]] = []
        self.ports: dict[str, RemoteNode] = {}
        self.reports: list[tuple[str, int, NodeReport]] = []
        self.updates: dict[str, list[SequenceUpdate]] = {}
        self.orders: dict[str, list[StopOrder]] = {}

    def joined(self, port: RemoteNode, member: RosterMember) -> None:
        with self.lock:
            self.events.append(("joined", port.name, port.epoch))
            self.ports[port.name] = port

    def draining(self, name: str) -> None:
        with self.lock:
            self.events.append(("draining", name, ""))

    def lost(self, name: str, reason: str) -> None:
        with self.lock:
            self.events.append(("lost", name, reason))
            del self.ports[name]

    def report(self, name: str, epoch: int, report: NodeReport) -> None:
        with self.lock:
            self.reports.append((name, epoch, report))

    def deliver(self, name: str, updates: Sequence[SequenceUpdate]) -> Sequence[StopOrder]:
        with self.lock:
            for update in updates:
                self.updates.setdefault(update.sequence_id, []).append(update)
            return self.orders.pop(name, ())

    def port(self, name: str) -> RemoteNode:
        """Of a member, once it is one."""
        return wait_for(lambda: self.ports.get(name), f"{name} joins")

    def tokens(self, sequence_id: str) -> list[int]:
        with self.lock:
            return [t for u in self.updates.get(sequence_id, ()) for t in u.token_ids]

    def finished(self, sequence_id: str) -> SequenceUpdate:
        """The update that ended it, once it is there."""

        def last() -> SequenceUpdate | None:
            with self.lock:
                news = self.updates.get(sequence_id)
            if news and (news[-1].finish_reason or news[-1].error):
                return news[-1]
            return None

        found: SequenceUpdate = wait_for(last, f"{sequence_id} ends")
        return found

    def seen(self, what: str, name: str) -> list[int | str]:
        """Epochs or reasons of the events of one kind."""
        with self.lock:
            return [detail for kind, who, detail in self.events if (kind, who) == (what, name)]


class CountingNode:
    """A `LocalNode` whose token at position p is p + seed, one for each sequence every `pace_s`."""

    def __init__(self, pace_s: float = 0.0) -> None:
        self.deliver: Deliver = lambda node, updates: ()
        self.pace_s = pace_s
        self.name = ""
        self.role = Role.HYBRID
        self.peers: dict[str, Peer] = {}
        self.calls: list[tuple[str, Any]] = []
        self.errands: list[Future[bool]] = []
        self.is_alive = True
        self._lock = threading.Condition()
        self._live: dict[SequenceKey, tuple[SequenceSpec, int]] = {}
        self._num_reports = 0
        self._ends = False
        self._thread = threading.Thread(target=self._run, name="counting-node")
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        with self._lock:
            return not self._live

    @property
    def live(self) -> list[str]:
        with self._lock:
            return [key.sequence_id for key in self._live]

    def enter(self, name: str, epoch: int, role: Role) -> None:
        assert self.is_idle
        self.name, self.role = name, role
        self.calls.append(("enter", (name, epoch, role)))
        self._num_reports = 0

    def leave(self) -> None:
        with self._lock:
            self._live.clear()
        self.peers.clear()
        self.calls.append(("leave", self.name))

    def start(self, specs: Sequence[SequenceSpec]) -> Future[None]:
        future: Future[None] = Future()
        with self._lock:
            keys = [SequenceKey(spec.sequence_id, spec.attempt) for spec in specs]
            if any(key in self._live for key in keys):
                future.set_exception(DuplicateRequestError("already here"))
                return future
            self._live.update(
                (key, (spec, spec.num_tokens)) for key, spec in zip(keys, specs, strict=True)
            )
            self._lock.notify_all()
        future.set_result(None)
        return future

    def stop(self, orders: Sequence[StopOrder]) -> None:
        self.calls.append(("stop", list(orders)))
        with self._lock:
            for order in orders:
                self._live.pop(order.key, None)

    def redirect(self, key: SequenceKey, decode_node: str | None) -> None:
        self.calls.append(("redirect", (key, decode_node)))

    def release(self, node: str) -> None:
        self.calls.append(("release", node))

    def set_role(self, role: Role) -> None:
        self.role = role

    def run_errand(self, kind: ErrandKind, duration_s: float) -> Future[bool]:
        self.calls.append(("errand", (kind, duration_s)))
        if self.errands:
            return self.errands.pop(0)
        done: Future[bool] = Future()
        done.set_result(True)
        return done

    def peer_joined(self, peer: Peer) -> None:
        self.peers[peer.name] = peer

    def peer_left(self, peer: Peer) -> None:
        self.peers.pop(peer.name, None)

    def report(self) -> NodeReport:
        self._num_reports += 1
        return NodeReport(load=load(len(self._live)), prefixes_cleared=self._num_reports == 1)

    def close(self) -> None:
        with self._lock:
            self._ends = True
            self._lock.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._ends or bool(self._live))
                if self._ends:
                    return
                updates = [self._step(key) for key in list(self._live)]
                # Under the lock, so that nothing is delivered any more after `leave`.
                self.deliver(self.name, updates)
            if self.pace_s:
                time.sleep(self.pace_s)

    def _step(self, key: SequenceKey) -> SequenceUpdate:
        spec, position = self._live[key]
        ends = position + 1 >= spec.max_total_tokens
        if ends:
            del self._live[key]
        else:
            self._live[key] = (spec, position + 1)
        return SequenceUpdate(
            sequence_id=key.sequence_id,
            attempt=key.attempt,
            start=position - len(spec.prompt_token_ids),
            token_ids=(position + spec.seed,),
            finish_reason="length" if ends else None,
            scheduled_s=time.monotonic(),
        )
