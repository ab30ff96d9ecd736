"""Grafana's dashboards as data: what a panel asks and shows, in rows of 24 columns."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

_SCHEMA_VERSION = 39  # Grafana 10 and later
_NUM_COLUMNS = 24
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_METRIC = re.compile(r"\b(?:vllm:|flowkv_|process_)[a-z0-9_:]+")

Kind = Literal["timeseries", "stat", "state-timeline"]
Threshold = tuple[float | None, str]
"""From this value on (None for the lowest) a value has this colour."""


@dataclass(frozen=True, slots=True)
class Query:
    """Prometheus' expression and what a line of its answer is called."""

    expression: str
    legend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel.

    Attributes:
        unit: Grafana's name of it, such as "s", "bytes", "percentunit".
        thresholds: from the lowest up; drawn as lines, and colours of a stat.
        dashed: names (a regular expression) of lines that are limits, not measurements.
        stacks: lines are parts of a whole.
        maximum: of the axis.
        columns, height: its size.
    """

    title: str
    meaning: str
    queries: Sequence[Query]
    unit: str = "short"
    kind: Kind = "timeseries"
    thresholds: Sequence[Threshold] = ()
    dashed: str = ""
    stacks: bool = False
    maximum: float | None = None
    columns: int = 8
    height: int = 8

    def to_json(self, number: int, x: int, y: int) -> dict[str, Any]:
        """Args: x, y: of its upper left corner."""
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.meaning,
            "datasource": _DATASOURCE,
            "gridPos": {"h": self.height, "w": self.columns, "x": x, "y": y},
            "targets": [
                {
                    "refId": chr(ord("A") + index),
                    "datasource": _DATASOURCE,
                    "expr": query.expression,
                    "legendFormat": query.legend,
                }
                for index, query in enumerate(self.queries)
            ],
            "fieldConfig": {"defaults": self._defaults(), "overrides": self._overrides()},
            "options": self._options(),
        }

    def _defaults(self) -> dict[str, Any]:
        steps = self.thresholds or ((None, "green"),)
        defaults: dict[str, Any] = {
            "unit": self.unit,
            "min": 0,
            "thresholds": {
                "mode": "absolute",
                "steps": [{"value": value, "color": color} for value, color in steps],
            },
        }
        if self.maximum is not None:
            defaults["max"] = self.maximum
        if self.kind == "timeseries":
            style = "dashed" if self.thresholds else "off"
            defaults["custom"] = {
                "fillOpacity": 20 if self.stacks else 0,
                "lineWidth": 1,
                "showPoints": "never",
                "stacking": {"mode": "normal" if self.stacks else "none"},
                "thresholdsStyle": {"mode": style},
            }
        return defaults

    def _overrides(self) -> list[dict[str, Any]]:
        if not self.dashed:
            return []
        dashes = {"fill": "dash", "dash": [8, 8]}
        return [
            {
                "matcher": {"id": "byRegexp", "options": self.dashed},
                "properties": [{"id": "custom.lineStyle", "value": dashes}],
            }
        ]

    def _options(self) -> dict[str, Any]:
        if self.kind == "stat":
            return {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "background"}
        legend = {"displayMode": "list", "placement": "bottom", "showLegend": True}
        if self.kind == "state-timeline":
            return {"legend": {**legend, "showLegend": False}, "mergeValues": True}
        return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under a title, left to right and then down."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """A board.

    Attributes:
        uid: by which Grafana knows it again.
        variables: label values to choose from: name of the label, and a metric that has it.
        marks: drawn over every panel: title and expression.
    """

    uid: str
    title: str
    rows: Sequence[Row]
    variables: Sequence[tuple[str, str]] = ()
    marks: Sequence[Query] = field(default=())

    @property
    def expressions(self) -> Iterator[str]:
        """Everything that Prometheus is asked."""
        for row in self.rows:
            for panel in row.panels:
                yield from (query.expression for query in panel.queries)
        yield from (mark.expression for mark in self.marks)
        yield from (f"{metric}{{}}" for _, metric in self.variables)

    @property
    def metrics(self) -> set[str]:
        """Names of all samples that are asked for."""
        return {name for each in self.expressions for name in _METRIC.findall(each)}

    def to_json(self) -> dict[str, Any]:
        return {
            "uid": self.uid,
            "title": self.title,
            "tags": ["flowkv"],
            "schemaVersion": _SCHEMA_VERSION,
            "editable": True,
            "refresh": "10s",
            "time": {"from": "now-30m", "to": "now"},
            "templating": {"list": self._variables()},
            "annotations": {"list": self._marks()},
            "panels": list(self._panels()),
        }

    def _variables(self) -> list[dict[str, Any]]:
        source = {"name": "datasource", "type": "datasource", "query": "prometheus"}
        chosen = [
            {
                "name": label,
                "type": "query",
                "datasource": _DATASOURCE,
                "query": f"label_values({metric}, {label})",
                "refresh": 2,  # whenever the time range changes
                "multi": True,
                "includeAll": True,
                "allValue": ".*",
                "current": {"text": "All", "value": "$__all"},
            }
            for label, metric in self.variables
        ]
        return [source, *chosen]

    def _marks(self) -> list[dict[str, Any]]:
        return [
            {
                "name": mark.legend,
                "enable": True,
                "datasource": _DATASOURCE,
                "expr": mark.expression,
                "iconColor": "purple",
            }
            for mark in self.marks
        ]

    def _panels(self) -> Iterator[dict[str, Any]]:
        number, y = 0, 0
        for row in self.rows:
            number += 1
            place = {"h": 1, "w": _NUM_COLUMNS, "x": 0, "y": y}
            yield {"id": number, "type": "row", "title": row.title, "gridPos": place, "panels": []}
            x, y, height = 0, y + 1, 0
            for panel in row.panels:
                if x + panel.columns > _NUM_COLUMNS:
                    x, y, height = 0, y + height, 0
                number += 1
                yield panel.to_json(number, x, y)
                x, height = x + panel.columns, max(height, panel.height)
            y += height
