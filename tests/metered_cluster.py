"""Metrics of a dispatcher and a controller over scripted nodes, on a clock moved by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import Metric
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_text

from flowkv_jax.cluster.dispatch_view import DispatchView
from flowkv_jax.cluster.dispatcher import Dispatcher
from flowkv_jax.controller.controller import Controller
from flowkv_jax.controller.role import Role
from flowkv_jax.metrics.reading import ServedModel
from flowkv_jax.metrics.serving_metrics import ServingMetrics
from flowkv_jax.sequence import SequenceUpdate
from tests.controller_cluster import node_info, node_load, node_report
from tests.scripted_nodes import Caller, ScriptedNode, new_caller

MODEL = ServedModel(name="m", max_model_len=100, block_size=16, cache_facts={"cache_dtype": "f32"})
OPENMETRICS = "application/openmetrics-text;version=1.0.0"


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class MeteredCluster:
    """Args: roles: of the nodes, by name."""

    def __init__(self, roles: dict[str, Role], **options: Any) -> None:
        self.clock = Clock()
        self.controller = Controller()
        options.setdefault("max_waiting_requests", 100)
        self.dispatcher = Dispatcher(self.controller, clock=self.clock, **options)
        view = DispatchView(self.dispatcher, self.controller, clock=self.clock)
        self.metrics = ServingMetrics(view.reading, MODEL)
        self.nodes: dict[str, ScriptedNode] = {}
        self.epochs: dict[str, int] = {}
        for name, role in roles.items():
            self.join(name, role)

    def join(self, name: str, role: Role = Role.HYBRID) -> None:
        self.epochs[name] = self.controller.join(node_info(name, role), self.clock.now_s)
        self.dispatcher.add_node(ScriptedNode(name, self.nodes))
        self.report(name)

    def leave(self, name: str) -> None:
        self.nodes[name].is_dead = True
        self.controller.leave(name, self.clock.now_s, "gone")
        self.dispatcher.lose_node(name, "gone")

    def report(self, name: str, *, load: dict[str, Any] | None = None, **what: Any) -> None:
        report = node_report(node_load(**(load or {})), **what)
        self.controller.report(name, self.epochs[name], report, self.clock.now_s)

    def submit(self, *args: Any, **options: Any) -> Caller:
        caller = new_caller(*args, **options)
        caller.accepted = self.dispatcher.submit(caller.submission)
        return caller

    def news(self, node: str, at_s: float, sequence_id: str = "r", **what: Any) -> None:
        """A node tells something of the latest attempt of a sequence, at a time."""
        self.clock.now_s = at_s
        self.nodes[node].hear()
        keys = [key for one in self.nodes.values() for key in one.started]
        attempt = max(key.attempt for key in keys if key.sequence_id == sequence_id)
        update = SequenceUpdate(sequence_id=sequence_id, attempt=attempt, **what)
        self.dispatcher.deliver(node, [update])

    def families(self, accept: str = "") -> dict[str, Metric]:
        return families_of(self.metrics, accept)

    def value(self, name: str, **labels: str) -> float:
        """Of the sample with these labels and no others but the model's name."""
        return value_of(self.metrics, name, **labels)

    def total(self, name: str) -> float:
        """Of all samples of this name."""
        return sum(value for _, value in samples_of(self.metrics, name))


def families_of(metrics: ServingMetrics, accept: str = "") -> dict[str, Metric]:
    body, content_type = metrics.render(accept)
    parse = parse_openmetrics if "openmetrics" in content_type else parse_text
    return {family.name: family for family in parse(body.decode())}


def samples_of(metrics: ServingMetrics, name: str) -> Iterator[tuple[dict[str, str], float]]:
    """Labels but the model's name, and values."""
    lines = metrics.render()[0].decode().splitlines(keepends=True)
    mine = [line for line in lines if line.startswith((f"{name}{{", f"{name} "))]
    for family in parse_text("".join(mine)):
        for sample in family.samples:
            labels = dict(sample.labels)
            labels.pop("model_name", None)
            yield labels, sample.value


def value_of(metrics: ServingMetrics, name: str, **labels: str) -> float:
    found = [value for given, value in samples_of(metrics, name) if given == labels]
    assert len(found) == 1, (name, labels, list(samples_of(metrics, name)))
    return found[0]
