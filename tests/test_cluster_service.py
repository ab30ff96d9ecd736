"""`flowkv.v1.Cluster` against a real server on loopback: what it shows, and who may steer."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st

from flowkv_jax import Engine, SamplingParams
from flowkv_jax.bench.serve_handoff import ServerHandoffs
from flowkv_jax.cluster.dispatch_events import SequenceRecord
from flowkv_jax.controller.decision_log import Candidate, Decision, DecisionKind
from flowkv_jax.controller.role import Role
from flowkv_jax.controller.snapshot import ClusterSnapshot, NodeState, NodeView, Regime
from flowkv_jax.errors import (
    ClientError,
    NotFoundError,
    RetryableRequestError,
    ServerError,
    UnprocessableError,
    ValidationError,
)
from flowkv_jax.load import NodeLoad
from flowkv_jax.rpc import cluster_wire
from flowkv_jax.rpc.client import Client
from flowkv_jax.rpc.cluster_servicer import MAX_DECISIONS, MAX_REQUESTS, MAX_WATCHERS
from flowkv_jax.rpc.flowkv.v1 import cluster_pb2 as pb
from flowkv_jax.rpc.flowkv.v1 import cluster_pb2_grpc as pb_grpc
from flowkv_jax.sequence import HandoffReport
from flowkv_jax.serving import Server
from tests.fake_engine import FakeEngine, served, serving
from tests.recorded_cluster import (
    DECODE,
    HANDOFF,
    MOVED,
    NEVER_RAN,
    NEW,
    PREFILL,
    RECORD,
    ROUTE,
    SNAPSHOT,
    SWITCH,
    RecordedView,
)


def engine_with(view: RecordedView) -> FakeEngine:
    engine = FakeEngine()
    engine.cluster = view
    return engine


@contextlib.asynccontextmanager
async def cluster_stub(server: Server) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(server.address) as channel:
        yield pb_grpc.ClusterStub(channel)


async def code_of(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details()


class TestWire:
    @pytest.mark.parametrize(
        ("values", "message"),
        [
            (ClusterSnapshot, pb.GetClusterResponse),
            (NodeView, pb.Node),
            (NodeLoad, pb.NodeLoad),
            (Decision, pb.Decision),
            (Candidate, pb.Candidate),
            (SequenceRecord, pb.FinishedRequest),
            (HandoffReport, pb.Handoff),
        ],
    )
    def test_messages_have_the_fields_of_the_values(self, values: type, message: Any) -> None:
        names = {field.name for field in dataclasses.fields(values)}
        assert set(message.DESCRIPTOR.fields_by_name) == names

    @pytest.mark.parametrize(
        ("kind", "prefix", "theirs"),
        [
            (Role, "ROLE", pb.Role),
            (NodeState, "NODE_STATE", pb.NodeState),
            (Regime, "REGIME", pb.Regime),
            (DecisionKind, "DECISION_KIND", pb.DecisionKind),
        ],
    )
    def test_enums_have_the_same_members(self, kind: Any, prefix: str, theirs: Any) -> None:
        ours = {f"{prefix}_{member.name}" for member in kind}
        assert set(theirs.keys()) == ours | {f"{prefix}_UNSPECIFIED"}

    @pytest.mark.parametrize("snapshot", [SNAPSHOT, replace(SNAPSHOT, nodes=())])
    def test_snapshots_come_back(self, snapshot: ClusterSnapshot) -> None:
        sent = cluster_wire.snapshot_to_wire(snapshot).SerializeToString()
        back = cluster_wire.snapshot_from_wire(pb.GetClusterResponse.FromString(sent))
        assert back == snapshot
        assert [list(node.metrics) for node in back.nodes] == [
            list(node.metrics) for node in snapshot.nodes
        ]

    @pytest.mark.parametrize("decision", [ROUTE, SWITCH])
    def test_decisions_come_back(self, decision: Decision) -> None:
        sent = cluster_wire.decision_to_wire(decision).SerializeToString()
        assert cluster_wire.decision_from_wire(pb.Decision.FromString(sent)) == decision

    @given(
        num_placements=st.integers(0, 8),
        queue_s=st.none() | st.floats(0, 1e9),
        node=st.none() | st.text(st.characters(exclude_categories=["Cs"])),
        reason=st.sampled_from(["stop", "length", "abort", "error"]),
        handoff=st.none() | st.just(HANDOFF),
    )
    def test_records_come_back(
        self, num_placements: int, queue_s: Any, node: Any, reason: Any, handoff: Any
    ) -> None:
        record = replace(
            RECORD, num_placements=num_placements, queue_s=queue_s, decode_node=node,
            finish_reason=reason, handoff=handoff,
        )  # fmt: skip
        sent = cluster_wire.record_to_wire(record).SerializeToString()
        assert cluster_wire.record_from_wire(pb.FinishedRequest.FromString(sent)) == record

    def test_a_request_that_never_ran(self) -> None:
        assert cluster_wire.record_from_wire(cluster_wire.record_to_wire(NEVER_RAN)) == NEVER_RAN
        assert cluster_wire.record_from_wire(cluster_wire.record_to_wire(MOVED)) == MOVED

    def test_an_id_that_is_no_text_does_not_hide_the_others(self) -> None:
        record = replace(RECORD, request_id="a\ud800b")
        assert cluster_wire.record_to_wire(record).request_id == "a?b"

    def test_what_a_newer_server_says_is_told(self) -> None:
        message = cluster_wire.snapshot_to_wire(SNAPSHOT)
        message.nodes[0].role = 17  # type: ignore[assignment]
        with pytest.raises(ServerError, match="Role 17, which is not known here"):
            cluster_wire.snapshot_from_wire(message)
        with pytest.raises(ServerError, match="'req-1' has ended"):
            cluster_wire.record_from_wire(pb.FinishedRequest(request_id="req-1"))


class TestShown:
    def test_a_client_sees_what_the_view_shows(self) -> None:
        view = RecordedView()
        with served(engine_with(view)) as address, Client(address) as client:
            cluster = client.cluster
            assert cluster.is_offered()
            assert cluster.snapshot() == SNAPSHOT
            assert cluster.decisions(2) == view.all_decisions[-2:]
            assert cluster.decisions(2, after=3) == view.all_decisions[1:3]
            assert cluster.records(100) == view.all_records
            assert cluster.records(2, after=0) == view.all_records[:2]
            assert cluster.records(2, after=8) == []

    async def test_pages_are_bounded_and_gaps_are_visible(self) -> None:
        view = RecordedView()
        view.all_decisions = [replace(ROUTE, number=n) for n in range(50, 500)]
        view.all_records = [replace(RECORD, number=n) for n in range(7, 2000)]
        async with serving(engine_with(view)) as server, cluster_stub(server) as stub:
            decisions = await stub.GetDecisions(pb.GetDecisionsRequest(limit=10_000))
            requests = await stub.GetRequests(pb.GetRequestsRequest(limit=10_000, after_number=2))
            usual = await stub.GetRequests(pb.GetRequestsRequest())
        assert len(decisions.decisions) == MAX_DECISIONS
        assert (decisions.decisions[-1].number, decisions.oldest_number) == (499, 50)
        assert len(requests.requests) == MAX_REQUESTS
        assert requests.requests[0].number == requests.oldest_number == 7
        assert [one.number for one in usual.requests] == list(range(1900, 2000))

    async def test_nothing_yet(self) -> None:
        view = RecordedView()
        view.all_decisions, view.all_records = [], []
        async with serving(engine_with(view)) as server, cluster_stub(server) as stub:
            assert await stub.GetDecisions(pb.GetDecisionsRequest()) == pb.GetDecisionsResponse()
            assert await stub.GetRequests(pb.GetRequestsRequest()) == pb.GetRequestsResponse()

    @pytest.mark.parametrize("values", [{"limit": 0}, {"limit": -1}, {"after_number": -1}])
    async def test_bad_pages(self, values: dict[str, int]) -> None:
        async with serving(engine_with(RecordedView())) as server, cluster_stub(server) as stub:
            code, words = await code_of(stub.GetRequests(pb.GetRequestsRequest(**values)))
        assert code is grpc.StatusCode.INVALID_ARGUMENT and words.startswith(next(iter(values)))

    async def test_a_watch_goes_on_until_it_is_ended(self) -> None:
        view = RecordedView()
        async with serving(engine_with(view)) as server, cluster_stub(server) as stub:
            call = stub.WatchCluster(pb.WatchClusterRequest(interval_s=0.1))
            first = await call.read()
            view.snapshot_now = replace(SNAPSHOT, nodes=())
            while (second := await call.read()).nodes:
                pass
            call.cancel()
        assert len(first.nodes) == 3 and second.now_s == SNAPSHOT.now_s

    async def test_a_server_that_stops_ends_watches(self) -> None:
        async with serving(engine_with(RecordedView())) as server, cluster_stub(server) as stub:
            call = stub.WatchCluster(pb.WatchClusterRequest(interval_s=60.0))
            await call.read()
            await server.stop()
            code, words = await code_of(call.read())
        assert (code, words) == (grpc.StatusCode.UNAVAILABLE, "the server shuts down")

    async def test_watches_are_bounded(self) -> None:
        async with serving(engine_with(RecordedView())) as server, cluster_stub(server) as stub:
            for interval_s in (0.0, 0.05, 61.0, float("nan")):
                request = pb.WatchClusterRequest(interval_s=interval_s)
                code, _ = await code_of(stub.WatchCluster(request).read())
                assert code is grpc.StatusCode.INVALID_ARGUMENT
            request = pb.WatchClusterRequest(interval_s=60.0)
            calls = [stub.WatchCluster(request) for _ in range(MAX_WATCHERS)]
            await asyncio.gather(*(call.read() for call in calls))
            code, _ = await code_of(stub.WatchCluster(request).read())
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            calls[0].cancel()
            async with asyncio.timeout(20):
                while True:  # the place of the one that left is free soon
                    calls[0] = stub.WatchCluster(request)
                    with contextlib.suppress(grpc.aio.AioRpcError):
                        assert (await calls[0].read()).nodes
                        break
            for call in calls:
                call.cancel()


class TestOffered:
    async def test_health_and_reflection_know_it(self) -> None:
        async with (
            serving(engine_with(RecordedView())) as server,
            grpc.aio.insecure_channel(server.address) as channel,
        ):
            request = health_pb2.HealthCheckRequest(service="flowkv.v1.Cluster")
            health = await health_pb2_grpc.HealthStub(channel).Check(request)
            call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            listed = (await call.read()).list_services_response
            call.cancel()
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        assert "flowkv.v1.Cluster" in {service.name for service in listed.service}

    def test_a_server_without_it(self) -> None:
        with served(FakeEngine()) as address, Client(address) as client:
            assert not client.cluster.is_offered()
            with pytest.raises(UnprocessableError, match="does not offer flowkv.v1.Cluster"):
                client.cluster.snapshot()

    def test_no_server(self) -> None:
        with Client("127.0.0.1:1", timeout=20) as client, pytest.raises(RetryableRequestError):
            client.cluster.is_offered()

    def test_it_wants_the_token_too(self) -> None:
        keys = {"FLOWKV_API_KEY": "sesame"}
        with served(engine_with(RecordedView()), keys) as address:
            with Client(address, api_key="sesame") as client:
                assert client.cluster.snapshot() == SNAPSHOT
            with Client(address) as client:
                for ask in (
                    client.cluster.is_offered,
                    client.cluster.snapshot,
                    lambda: client.cluster.drain("decode-0"),
                ):
                    with pytest.raises(ClientError, match="needs a known token"):
                        ask()


class TestSteered:
    async def test_the_answer_shows_the_node(self) -> None:
        view = RecordedView()
        async with serving(engine_with(view)) as server, cluster_stub(server) as stub:
            answer = await stub.SetRole(pb.SetRoleRequest(node="decode-0", role=pb.ROLE_HYBRID))
            drained = await stub.Drain(pb.DrainRequest(node="prefill-0"))
        assert view.orders == [("decode-0", Role.HYBRID), ("prefill-0", "drain")]
        assert answer.node == cluster_wire.node_to_wire(DECODE)
        assert drained.node == cluster_wire.node_to_wire(PREFILL)

    def test_what_is_refused(self) -> None:
        view = RecordedView()
        view.snapshot_now = replace(SNAPSHOT, nodes=(replace(NEW, state=NodeState.LEAVING),))
        with served(engine_with(view)) as address, Client(address) as client:
            for name in ("prefill-9", "", "x" * 300):
                with pytest.raises(NotFoundError, match="no node"):
                    client.cluster.drain(name)
                with pytest.raises(NotFoundError, match="no node"):
                    client.cluster.set_role(name, Role.DECODE)
            with pytest.raises(UnprocessableError, match="is leaving"):
                client.cluster.set_role("prefill-1", Role.DECODE)
        assert view.orders == []

    @pytest.mark.parametrize("role", [0, 9])
    async def test_no_role(self, role: int) -> None:
        async with serving(engine_with(RecordedView())) as server, cluster_stub(server) as stub:
            request = pb.SetRoleRequest(node="decode-0", role=role)  # type: ignore[arg-type]
            code, words = await code_of(stub.SetRole(request))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert words == f"role={role} is none of ROLE_PREFILL, ROLE_DECODE, ROLE_HYBRID"
        with pytest.raises(ValidationError):
            cluster_wire.role_from_wire(role)

    @pytest.mark.parametrize(
        ("settings", "is_admin"),
        [
            ({}, True),
            ({"enable_admin": False}, False),
            ({"host": "0.0.0.0", "allow_insecure_bind": True}, False),
            ({"host": "0.0.0.0", "allow_insecure_bind": True, "enable_admin": True}, True),
        ],
    )
    def test_who_may(self, settings: dict[str, Any], is_admin: bool) -> None:
        view = RecordedView()
        with served(engine_with(view), **settings) as address:
            port = address.rpartition(":")[2]
            with Client(f"127.0.0.1:{port}") as client:
                if is_admin:
                    client.cluster.drain("decode-0")
                else:
                    with pytest.raises(UnprocessableError, match="--enable-admin"):
                        client.cluster.drain("decode-0")
                    with pytest.raises(UnprocessableError, match="--enable-admin"):
                        client.cluster.set_role("decode-0", Role.HYBRID)
        assert bool(view.orders) == is_admin


class TestHandoffSource:
    def test_each_record_comes_once_in_pages(self) -> None:
        view = RecordedView()
        view.all_records = [
            replace(RECORD, number=n, handoff=None if n % 2 else HANDOFF) for n in range(1, 2500)
        ]
        source = ServerHandoffs(view)
        first = source.fetch(0)
        assert [one.number for one in first] == list(range(2, 2500, 2))
        (one,) = {replace(record, number=0) for record in first}
        assert (one.queue_s, one.prefill_s, one.transfer_s) == (0.501, 1.0, 0.0025)
        assert (one.runs, one.calls, one.data_bytes) == (2, 1, 14 << 20)
        assert source.fetch(first[-1].number + 1) == []
        view.all_records.append(replace(RECORD, number=2500))
        assert [one.number for one in source.fetch(2499)] == [2500]

    def test_what_was_forgotten_is_told_once(self) -> None:
        view = RecordedView()  # remembers 4 to 8
        source = ServerHandoffs(view)
        assert [one.number for one in source.fetch(0)] == [4, 5, 6, 7, 8]
        view.all_records = [replace(RECORD, number=n) for n in (12, 13)]
        with pytest.raises(ServerError, match="forgotten 3 requests"):
            source.fetch(9)
        assert [one.number for one in source.fetch(9)] == [12, 13]


class TestEngines:
    """The view that an engine's nodes offer, seen through a server."""

    def test_one_prefill_and_one_decode_node(self, make_engine: Callable[..., Engine]) -> None:
        engine = make_engine(prefill_nodes=1, decode_nodes=1)
        params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        engine.generate([[1, 2, 3], list(range(1, 40))], params, request_id=["a", "b"])
        fake = FakeEngine()
        fake.cluster = engine.cluster
        with served(fake) as address, Client(address) as client:
            cluster = client.cluster
            snapshot = cluster.snapshot()
            assert [(n.name, n.role) for n in snapshot.nodes] == [
                ("decode-0", Role.DECODE),
                ("prefill-0", Role.PREFILL),
            ]
            records = cluster.records(10)
            assert records == engine.cluster.records(10)
            assert {(r.request_id, r.num_output_tokens) for r in records} == {("a", 4), ("b", 4)}
            assert [record.number for record in records] == [1, 2]
            for record in records:
                assert record.handoff is not None and record.handoff.dst == "decode-0"
            assert len(ServerHandoffs(cluster).fetch(0)) == 2
            decisions = cluster.decisions(100, after=0)
            assert decisions == engine.cluster.decisions(100, after=0)
            routed = [one.subject for one in decisions if one.kind is DecisionKind.ROUTE]
            assert len(routed) == 2
            with pytest.raises(NotFoundError, match="no node 'decode-7'"):
                cluster.set_role("decode-7", Role.HYBRID)
            cluster.set_role("decode-0", Role.HYBRID)
            cluster.drain("prefill-0")
            decode, prefill = cluster.snapshot().nodes
            assert decode.home_role is Role.HYBRID
            assert prefill.state in (NodeState.LEAVING, NodeState.DRAINED)
        (output,) = engine.generate([[5, 6, 7]], params)
        assert len(output.outputs[0].token_ids) == 4
        assert engine.cluster.records(1)[0].prefill_node == "decode-0"

    def test_a_lone_node_reports_when_somebody_looks(
        self, make_engine: Callable[..., Engine]
    ) -> None:
        engine = make_engine()
        (node,) = engine.cluster.snapshot().nodes
        assert (node.name, node.role) == ("hybrid-0", Role.HYBRID)
        assert node.load is not None and node.load.num_blocks == 64
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
        (record,) = engine.cluster.records(10)
        assert record.handoff is None and record.prefill_node == record.decode_node == "hybrid-0"
