"""The graph, its paths, the mock factories and the file format."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from transfer import PathType, Topology
from transfer.errors import NoPath, UnknownNode
from transfer.graph import LinkType, NodeType
from transfer.topology_file import TopologyFileError

ROOT = Path(__file__).resolve().parents[1]


def joined(topology: Topology, hops: tuple[str, ...], legs: tuple[tuple[int, ...], ...]) -> bool:
    """Whether each leg leads from its hop to the next, over conduits only."""
    for (start, end), leg in zip(zip(hops, hops[1:], strict=False), legs, strict=True):
        at = start
        for index in leg:
            link = topology.links[index]
            if link.src != at or (at != start and topology.node(at).node_type.is_place):
                return False
            at = link.dst
        if at != end:
            return False
    return True


class TestPaths:
    def test_mock_dgx(self) -> None:
        topology = Topology.make_mock_dgx(8)
        paths = topology.paths("gpu0", "gpu7")
        assert [p.path_type for p in paths] == [
            PathType.DIRECT,
            *[PathType.NVLINK_RELAY] * 6,
            PathType.STORAGE_RELAY,
        ]
        assert [p.hops for p in paths[:2]] == [("gpu0", "gpu7"), ("gpu0", "gpu1", "gpu7")]

    def test_two_hosts(self) -> None:
        topology = Topology.make_mock_two_hosts(4)
        paths = topology.paths("host0/gpu0", "host1/gpu3")
        assert paths[0].hops == ("host0/gpu0", "host1/gpu3")
        assert paths[0].path_type is PathType.CROSS_NODE_RELAY
        assert {p.path_type for p in paths[1:]} == {
            PathType.CROSS_NODE_RELAY,
            PathType.STORAGE_RELAY,
        }
        assert any(len(p.hops) == 4 for p in paths)
        inside = topology.paths("host1/gpu0", "host1/gpu1")
        assert inside[0].path_type is PathType.DIRECT
        assert not any("host0" in hop for p in inside for hop in p.hops)

    @pytest.mark.parametrize(
        "topology", [Topology.make_mock_dgx(4), Topology.make_mock_two_hosts(3)], ids=["dgx", "two"]
    )
    def test_every_path_is_one(self, topology: Topology) -> None:
        places = [n.name for n in topology.nodes if n.node_type.is_place]
        for src, dst in permutations(places, 2):
            paths = topology.paths(src, dst)
            assert len({p.hops for p in paths}) == len(paths)
            for path in paths:
                assert (path.hops[0], path.hops[-1]) == (src, dst)
                assert joined(topology, path.hops, path.legs)
                assert path.links == tuple(i for leg in path.legs for i in leg)
                assert len(set(path.links)) == len(path.links)
                assert path.bandwidth == min(topology.links[i].bandwidth for i in path.links)
                assert path.latency_s == pytest.approx(
                    sum(topology.links[i].latency_us for i in path.links) / 1e6
                )

    def test_to_storage_itself(self) -> None:
        topology = Topology.make_mock_two_hosts(2)
        paths = topology.paths("host0/gpu0", "storage")
        assert [p.path_type for p in paths][:1] == [PathType.DIRECT]
        assert PathType.CROSS_NODE_RELAY not in {p.path_type for p in paths}

    def test_enumerated_once(self) -> None:
        topology = Topology.make_mock_two_hosts(8)
        assert topology.enumerate_all() >= 1000
        assert topology.paths("host0/gpu0", "host1/gpu7") is topology.paths(
            "host0/gpu0", "host1/gpu7"
        )

    def test_adding_forgets_paths(self) -> None:
        topology = Topology.make_mock_dgx(2)
        assert len(topology.paths("gpu0", "gpu1")) == 2
        revision = topology.revision
        topology.add_node("gpu2", NodeType.GPU)
        for gpu in ("gpu0", "gpu1"):
            topology.add_link(gpu, "gpu2", LinkType.NVLINK, bandwidth=25)
        assert topology.revision > revision
        assert len(topology.paths("gpu0", "gpu1")) == 3

    def test_processes(self) -> None:
        topology = Topology.make_mock_two_hosts(1)
        topology.add_process("a", host="host0")
        topology.add_process("b", host="host0")
        topology.add_process("c", host="host1")
        assert topology.paths("a", "b")[0].bandwidth == 10.0
        assert [p.path_type for p in topology.paths("a", "b")] == [
            PathType.DIRECT,
            PathType.STORAGE_RELAY,
        ]
        assert topology.paths("a", "c")[0].path_type is PathType.CROSS_NODE_RELAY
        with pytest.raises(ValueError, match="no place of type 'host' on host 'mars'"):
            topology.add_process("d", host="mars")


class TestBadInput:
    def test_unknown_node(self) -> None:
        topology = Topology.make_mock_dgx(2)
        with pytest.raises(UnknownNode, match=r"unknown node 'gpu9'; there are: .*gpu0, gpu1"):
            topology.paths("gpu0", "gpu9")
        with pytest.raises(UnknownNode, match="there are: none"):
            Topology().node("x")

    @pytest.mark.parametrize(
        ("src", "dst", "message"),
        [
            ("gpu0", "gpu0", "both 'gpu0'"),
            ("gpu0", "pcie", "'pcie' is a switch node: bytes only cross it"),
        ],
    )
    def test_no_such_transfer(self, src: str, dst: str, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            Topology.make_mock_dgx(2).paths(src, dst)

    def test_no_path(self) -> None:
        topology = Topology()
        topology.add_node("a", NodeType.HOST)
        topology.add_node("b", NodeType.HOST)
        with pytest.raises(NoPath, match="no path from 'a' to 'b'"):
            topology.paths("a", "b")

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"bandwidth": 0}, "bandwidth=0 of link 'gpu0' - 'x'"),
            ({"bandwidth": float("nan")}, "bandwidth=nan"),
            ({"bandwidth": 1, "latency_us": -1}, "latency_us=-1"),
        ],
    )
    def test_links(self, settings: dict[str, Any], message: str) -> None:
        topology = Topology.make_mock_dgx(2)
        topology.add_node("x", NodeType.GPU)
        with pytest.raises(ValueError, match=message):
            topology.add_link("gpu0", "x", LinkType.NVLINK, **settings)

    def test_twice(self) -> None:
        topology = Topology.make_mock_dgx(2)
        with pytest.raises(ValueError, match="'gpu0' is already"):
            topology.add_node("gpu0", NodeType.GPU)
        with pytest.raises(ValueError, match="joined already"):
            topology.add_link("gpu1", "gpu0", LinkType.NVLINK, bandwidth=1)
        with pytest.raises(ValueError, match="with itself"):
            topology.add_link("gpu1", "gpu1", LinkType.NVLINK, bandwidth=1)

    @pytest.mark.parametrize("make", [Topology.make_mock_dgx, Topology.make_mock_two_hosts])
    def test_mock_needs_gpus(self, make: Any) -> None:
        with pytest.raises(ValueError, match="num_gpus=0"):
            make(0)


class TestFile:
    def read(self, tmp_path: Path, text: str) -> Topology:
        path = tmp_path / "links.yaml"
        path.write_text(text, encoding="utf-8")
        return Topology.from_file(path)

    def test_shipped_file_is_the_mock(self) -> None:
        shipped, mock = (
            Topology.from_file(ROOT / "configs/links_dgx8.yaml"),
            Topology.make_mock_dgx(8),
        )
        assert {n.name: n.node_type for n in shipped.nodes} == {
            n.name: n.node_type for n in mock.nodes
        }
        assert {(k.src, k.dst, k.link_type, k.bandwidth, k.latency_us) for k in shipped.links} == {
            (k.src, k.dst, k.link_type, k.bandwidth, k.latency_us) for k in mock.links
        }

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("nodes: [{name: a, type: gpu, hots: x}]", r"unknown key 'hots' in nodes\[0\].*'host'"),
            ("node: []", "unknown key 'node' in the file.*did you mean 'nodes'"),
            ("[]", "the file must be a mapping, not list"),
            ("{", "not YAML"),
            ("nodes: [{type: gpu}]", "needs 'name' or 'names'"),
            ("nodes: [{name: a, type: tpu}]", "unknown type 'tpu'; there are: gpu, host"),
            ("nodes: [{name: 3, type: gpu}]", "name 3 must be text"),
            ("nodes: 3", "nodes must be a list"),
            ("links: []", "the file has no 'nodes'"),
        ],
    )
    def test_bad_nodes(self, tmp_path: Path, text: str, message: str) -> None:
        with pytest.raises(TopologyFileError, match=message) as caught:
            self.read(tmp_path, text)
        assert "links.yaml" in str(caught.value)

    @pytest.mark.parametrize(
        ("link", "message"),
        [
            ("{among: [a, b], type: nvlink}", "has no 'bandwidth_gb_per_s'"),
            ("{type: nvlink, bandwidth_gb_per_s: 1}", "needs 'among' or 'between'"),
            ("{among: [a, b], type: nvlink, bandwidth_gb_per_s: fast}", "'fast' must be a number"),
            ("{among: [a, b], type: nvlink, bandwidth_gb_per_s: -1}", "must be above 0"),
            ("{among: [a, c], type: nvlink, bandwidth_gb_per_s: 1}", "unknown node 'c'"),
            ("{between: [a], type: nvlink, bandwidth_gb_per_s: 1}", "has 1 sides"),
        ],
    )
    def test_bad_links(self, tmp_path: Path, link: str, message: str) -> None:
        text = f"nodes: [{{names: [a, b], type: gpu}}]\nlinks: [{link}]"
        with pytest.raises(TopologyFileError, match=message):
            self.read(tmp_path, text)
