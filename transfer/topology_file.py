"""A topology from a YAML file.

    nodes:
      - {names: [gpu0, gpu1], type: gpu, host: a}
      - {name: storage, type: storage}
    links:
      - {among: [gpu0, gpu1], type: nvlink, bandwidth_gb_per_s: 25, latency_us: 2}
      - {between: [[gpu0, gpu1], storage], type: snic, bandwidth_gb_per_s: 3}

`among` joins every two of its nodes; `between` joins each of the first with each of the second.
`latency_us` and `host` may be left out. Types are the values of `NodeType` and `LinkType`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from difflib import get_close_matches
from itertools import combinations, product
from pathlib import Path
from typing import Any, TypeVar

import yaml

from transfer.graph import LinkType, NodeType
from transfer.topology import Topology

_Kind = TypeVar("_Kind", bound=enum.Enum)


class TopologyFileError(ValueError):
    """A topology file says something it may not. The message names file, entry and key."""


def read_topology(path: Path) -> Topology:
    """Raises `TopologyFileError`; OSError if the file cannot be read."""
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise TopologyFileError(f"{path}: not YAML: {error}") from None
    try:
        return _build(document)
    except ValueError as error:
        raise TopologyFileError(f"{path}: {error}") from None


def _build(document: Any) -> Topology:
    topology = Topology()
    top = _mapping("the file", document, required={"nodes"}, optional={"links"})
    for index, entry in enumerate(_list("nodes", top["nodes"])):
        where = f"nodes[{index}]"
        node = _mapping(where, entry, required={"type"}, optional={"name", "names", "host"})
        if ("name" in node) == ("names" in node):
            raise ValueError(f"{where} needs 'name' or 'names', one of them")
        kind = _kind(where, node["type"], NodeType)
        for name in _names(where, node.get("name", node.get("names"))):
            topology.add_node(name, kind, host=_text(where, "host", node.get("host", "")))
    for index, entry in enumerate(_list("links", top.get("links", []))):
        where = f"links[{index}]"
        link = _mapping(
            where,
            entry,
            required={"type", "bandwidth_gb_per_s"},
            optional={"among", "between", "latency_us"},
        )
        latency_us = link.get("latency_us")
        for a, b in _pairs(where, link):
            topology.add_link(
                a,
                b,
                _kind(where, link["type"], LinkType),
                bandwidth=_number(where, "bandwidth_gb_per_s", link["bandwidth_gb_per_s"]),
                latency_us=None if latency_us is None else _number(where, "latency_us", latency_us),
            )
    return topology


def _pairs(where: str, link: dict[str, Any]) -> Iterable[tuple[str, str]]:
    if ("among" in link) == ("between" in link):
        raise ValueError(f"{where} needs 'among' or 'between', one of them")
    if "among" in link:
        return combinations(_names(where, link["among"]), 2)
    sides = _list(f"{where}.between", link["between"])
    if len(sides) != 2:
        raise ValueError(f"{where}.between has {len(sides)} sides; it needs 2")
    return product(_names(where, sides[0]), _names(where, sides[1]))


def _mapping(where: str, value: Any, *, required: set[str], optional: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be a mapping, not {type(value).__name__}")
    known = sorted(required | optional)
    for key in value:
        if key not in known:
            close = get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"unknown key {key!r} in {where}: known are {', '.join(known)}{hint}")
    for key in sorted(required - set(value)):
        raise ValueError(f"{where} has no {key!r}")
    return value


def _list(where: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{where} must be a list, not {type(value).__name__}")
    return value


def _names(where: str, value: Any) -> list[str]:
    names = value if isinstance(value, list) else [value]
    return [_text(where, "name", name) for name in names]


def _text(where: str, key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where}: {key} {value!r} must be text")
    return value


def _number(where: str, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{where}: {key} {value!r} must be a number")
    return float(value)


def _kind(where: str, value: Any, kinds: type[_Kind]) -> _Kind:
    try:
        return kinds(value)
    except ValueError:
        known = ", ".join(kind.value for kind in kinds)
        raise ValueError(f"{where}: unknown type {value!r}; there are: {known}") from None
