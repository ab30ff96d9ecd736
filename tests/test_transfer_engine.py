"""The transfer engine: one suite over every backend, between engines in one process and in two."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from pallas_kernels.kv_layout import KVLayout
from tests.transfer_peer import LAYOUT, assert_moved, filled_pool, peer_process, request
from transfer.arrival import Arrival
from transfer.backends.defaults import default_backends
from transfer.backends.shared_memory import SharedMemoryBackend
from transfer.config import TransferConfig
from transfer.engine import TransferEngine
from transfer.errors import (
    BlocksBusy,
    Cancelled,
    DeadlineExceeded,
    EngineClosed,
    HandshakeMismatch,
    NoPath,
    PoolBoundsError,
    RequestError,
    StaleGeneration,
    UnknownNode,
)
from transfer.lifecycle import TransferState
from transfer.pool_access import NumpyPool
from transfer.strategies import Strategy, num_calls
from transfer.testing import Arrivals, Fault, ScriptedBackend, engine_pair
from transfer.types import (
    BlockRun,
    Candidate,
    PathDecision,
    PathPart,
    PathType,
    TransferRequest,
    Verification,
)

WAYS = ("local", "shared_memory", "ring", "tcp", "storage")
FRAGMENTED = [(0, 60, 1), (5, 3, 2), (9, 40, 4), (8, 0, 1)]


class Ends:
    """Two pools and the engine that moves between them."""

    def __init__(self, way: str, folder: Path, stack: ExitStack) -> None:
        self.arrivals = Arrivals()
        config = TransferConfig(storage_dir=folder, inline_bytes=2048, chunk_bytes=4096)
        self.a, self.b = filled_pool(64, 1), filled_pool(64, 2)
        self.source = stack.enter_context(self._engine(way, config))
        self.source.register_pool("a", self.a)
        self.destination = self.source
        if way == "local":
            self.source.register_pool("b", self.b)
        else:
            self.destination = stack.enter_context(self._engine(way, config))
            self.destination.register_pool("b", self.b)
            assert self.source.connect(self.destination.listen()) == ["b"]
        self.backend = "shared_memory" if way == "ring" else way

    def _engine(self, way: str, config: TransferConfig) -> TransferEngine:
        backends = default_backends(config)
        if way == "ring":
            backends[0] = SharedMemoryBackend(config, single_copy=False)
        return TransferEngine(config, backends=backends, on_arrival=self.arrivals)

    def assert_free(self) -> None:
        assert self.source.pinned("a", list(range(64))) == []
        assert self.destination.pinned("b", list(range(64))) == []


@pytest.fixture(params=WAYS)
def ends(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ends]:
    with ExitStack() as stack:
        yield Ends(request.param, tmp_path / "shared", stack)


class TestEveryBackend:
    @pytest.mark.parametrize("verification", Verification)
    @pytest.mark.parametrize("runs", [[(3, 5, 1)], [(0, 0, 64)], FRAGMENTED], ids=str)
    def test_what_was_asked_for_arrives_and_nothing_else(
        self, ends: Ends, runs: list[tuple[int, int, int]], verification: Verification
    ) -> None:
        before = ends.b.rows.copy()
        req = request(runs, verification=verification)
        report = ends.source.submit(req, backend=ends.backend).wait(20)
        assert_moved(ends.a, ends.b, req)
        untouched = np.ones(64, bool)
        for _, start, count in runs:
            untouched[start : start + count] = False
        np.testing.assert_array_equal(ends.b.rows[untouched], before[untouched])
        assert (report.calls, report.runs, report.retries) == (len(runs), len(runs), 0)
        assert report.data_bytes == req.data_bytes
        ends.assert_free()

    @pytest.mark.parametrize("strategy", Strategy)
    def test_strategies_move_the_same_in_the_calls_of_their_formula(
        self, ends: Ends, strategy: Strategy
    ) -> None:
        req = request(FRAGMENTED, verification=Verification.CHECKSUM)
        report = ends.source.submit(req, backend=ends.backend, strategy=strategy).wait(20)
        assert_moved(ends.a, ends.b, req)
        assert report.calls == num_calls(strategy, 8, 4, LAYOUT.num_layers)
        [counted] = ends.source.metrics.snapshot().values()
        assert (counted.calls, counted.runs, counted.transfers) == (report.calls, 4, 1)
        assert counted.data_bytes == req.data_bytes and counted.seconds > 0

    def test_many_at_once(self, ends: Ends) -> None:
        requests = [request([(8 * i, 56 - 8 * i, 8)]) for i in range(8)]
        handles = [ends.source.submit(req, backend=ends.backend) for req in requests]
        for handle, req in zip(handles, requests, strict=True):
            handle.wait(20)
            assert_moved(ends.a, ends.b, req)
        ends.assert_free()

    def test_the_destination_hears_of_it(self, ends: Ends) -> None:
        req = request([(0, 0, 16)], tag="prompt 7")
        handle = ends.source.submit(req, backend=ends.backend)
        path_type, backend = handle.wait(20).way
        assert handle.poll() is TransferState.COMPLETED and handle.error is None
        arrival = ends.arrivals.wait(handle.transfer)
        assert arrival == Arrival(
            handle.transfer, "b", TransferState.COMPLETED, None, "prompt 7", path_type, backend
        )
        assert path_type == "Direct" and backend

    def test_both_directions(self, ends: Ends) -> None:
        if ends.backend == "local":
            back, source = request([(1, 2, 20)], "b", "a"), ends.source
        else:
            back, source = request([(1, 2, 20)], "b", "a"), ends.destination
        source.submit(back, backend=ends.backend).wait(20)
        assert_moved(ends.b, ends.a, back)


@pytest.mark.parametrize("way", ["shared_memory", "ring", "tcp", "storage"])
def test_between_two_processes(way: str, tmp_path: Path) -> None:
    config = TransferConfig(storage_dir=tmp_path)
    backends = default_backends(config)
    if way == "ring":
        backends[0] = SharedMemoryBackend(config, single_copy=False)
    backend = "shared_memory" if way == "ring" else way
    pool = filled_pool(5000, 1)
    with (
        TransferEngine(config, secret="s3cret", backends=backends) as engine,
        peer_process(
            num_blocks=5000, secret="s3cret", ring=way == "ring", storage_dir=str(tmp_path)
        ) as peer,
    ):
        engine.register_pool("a", pool)
        engine.connect(peer.address)
        for runs in ([(1, 2, 1)], [(0, 0, 4096)], [(2 * i, 3 * i, 1) for i in range(1500)]):
            req = request(runs, verification=Verification.CHECKSUM)
            engine.submit(req, backend=backend).wait(30)
            for run in (req.runs[0], req.runs[-1]):
                sent = pool.rows[run.src_start : run.src_start + run.num_blocks].tobytes()
                assert peer.crc(run.dst_start, run.num_blocks) == zlib.crc32(sent)
        assert peer.ask("pins") == "0"
        # And the other way, from a process that was dialled.
        name = peer.ask(f"submit a 100 200 3000 {backend}")
        assert peer.ask(f"state {name}") == "completed NoneType"
        assert peer.crc(100, 3000) == zlib.crc32(pool.rows[200:3200].tobytes())
        peer.ask("pins")
    assert [p.name for p in tmp_path.iterdir() if p.suffix in (".kv", ".part")] == []


class TestRefusals:
    """Nothing begins, and the error names what is wrong."""

    @pytest.fixture
    def engines(self) -> Iterator[tuple[TransferEngine, TransferEngine]]:
        with engine_pair() as (source, destination):
            source.register_pool("a", filled_pool(64, 1))
            destination.register_pool("b", filled_pool(32, 2))
            source.connect(destination.listen_address)
            yield source, destination

    @pytest.mark.parametrize(
        ("req", "error", "text"),
        [
            (request([(0, 0, 1)], "x"), UnknownNode, "'x' is not registered here"),
            (request([(0, 0, 1)], "a", "x"), UnknownNode, "no pool 'x'"),
            (request([(64, 0, 1)]), PoolBoundsError, r"\[64, 65\) are not in a, .* 64 blocks"),
            (request([(0, 31, 2)]), PoolBoundsError, r"\[31, 33\) are not in b, .* 32 blocks"),
            (TransferRequest("a", "b", 100), RequestError, "names no runs"),
            (
                TransferRequest("a", "b", 100, (BlockRun(0, 0, 1),), 100),
                RequestError,
                "block_bytes=100, but a block of a has 2048",
            ),
            (
                request([(0, 0, 1)], src_generations=(1,)),
                StaleGeneration,
                "a keeps no generations",
            ),
        ],
    )
    def test_bad_requests(
        self,
        engines: tuple[TransferEngine, TransferEngine],
        req: TransferRequest,
        error: type[Exception],
        text: str,
    ) -> None:
        with pytest.raises(error, match=text):
            engines[0].submit(req)
        assert engines[0].pinned("a", list(range(64))) == []

    def test_a_named_backend_that_cannot_serve_says_why(
        self, engines: tuple[TransferEngine, TransferEngine]
    ) -> None:
        with pytest.raises(NoPath, match="nixl: not set up here; there are"):
            engines[0].submit(request([(0, 0, 1)]), backend="nixl")
        engines[0].register_pool("c", filled_pool(8, 3))
        with pytest.raises(NoPath, match="both nodes are in this process"):
            engines[0].submit(request([(0, 0, 1)], "a", "c"), backend="tcp")

    def test_pools_that_do_not_fit(self, engines: tuple[TransferEngine, TransferEngine]) -> None:
        other = KVLayout(2, 4, 4, 8, "float16", 2)
        engines[0].register_pool("half", NumpyPool(other, 8))
        block = other.bytes_per_block
        req = TransferRequest("half", "b", block, (BlockRun(0, 0, 1),), block)
        with pytest.raises(HandshakeMismatch, match="dtype float32 there, float16 here"):
            engines[0].submit(req)

    def test_a_name_twice(self, engines: tuple[TransferEngine, TransferEngine]) -> None:
        with pytest.raises(RequestError, match="'a' is registered already"):
            engines[0].register_pool("a", filled_pool(8, 3))

    def test_after_close(self) -> None:
        engine = TransferEngine()
        engine.register_pool("a", filled_pool(8, 1))
        engine.close()
        engine.close()
        with pytest.raises(EngineClosed):
            engine.submit(request([(0, 0, 1)], "a", "a"))


class TestGenerations:
    def test_a_block_freed_before_or_during_the_move_is_refused(self) -> None:
        generations = {"a": [0] * 64, "b": [0] * 64}

        def pool(node: str, seed: int) -> NumpyPool:
            rows = filled_pool(64, seed).rows
            counts = generations[node]
            return NumpyPool(LAYOUT, 64, rows, lambda ids: [counts[i] for i in ids])

        backend = ScriptedBackend()
        with engine_pair([backend]) as (source, destination):
            source.register_pool("a", pool("a", 1))
            destination.register_pool("b", pool("b", 2))
            source.connect(destination.listen_address)
            good = request([(0, 4, 2)], src_generations=(0, 0), dst_generations=(0, 0))
            source.submit(good).wait(10)
            generations["a"][1] = 1
            with pytest.raises(StaleGeneration, match="block 1 of a has generation 1"):
                source.submit(good)
            stale = request([(0, 4, 2)], src_generations=(0, 1), dst_generations=(0, 7))
            with pytest.raises(StaleGeneration, match="block 5 of b has generation 0, .* at 7"):
                source.submit(stale).wait(10)
            # Freed while the bytes were on their way: the destination must not complete.
            for node, block, kind in (("a", 0, "a"), ("b", 4, "b")):
                receive = destination.backend("tcp").receive

                def and_then_free(*args, receive=receive, node=node, block=block):  # type: ignore[no-untyped-def]
                    calls = receive(*args)
                    generations[node][block] += 1
                    return calls

                destination.backend("tcp").receive = and_then_free  # type: ignore[method-assign]
                now = request(
                    [(0, 4, 2)],
                    src_generations=tuple(generations["a"][:2]),
                    dst_generations=tuple(generations["b"][4:6]),
                )
                with pytest.raises(StaleGeneration, match=f"block {block} of {kind}"):
                    source.submit(now).wait(10)
                destination.backend("tcp").receive = receive  # type: ignore[method-assign]
            assert source.pinned("a", list(range(64))) == []
            assert destination.pinned("b", list(range(64))) == []


class Chooser:
    """A selector whose decisions are set."""

    def __init__(self, *candidates: Candidate) -> None:
        self.candidates = candidates
        self.observed: list[tuple[tuple[str, ...], int]] = []

    def select(self, req: TransferRequest) -> PathDecision:
        return PathDecision(req, self.candidates[0], self.candidates, "set")

    def observe(self, hops: tuple[str, ...], data_bytes: int, seconds: float) -> None:
        self.observed.append((tuple(hops), data_bytes))


def candidate(
    kind: PathType, *parts: tuple[tuple[str, ...], list[tuple[int, int, int]]]
) -> Candidate:
    made = []
    for hops, runs in parts:
        block_runs = tuple(BlockRun(*run) for run in runs)
        size = sum(run.num_blocks for run in block_runs) * LAYOUT.bytes_per_block
        made.append(PathPart(hops, max(size, 1), block_runs))
    return Candidate(kind, tuple(made), 1.0, {}, 1.0)


class TestPaths:
    def run_with(self, chooser: Chooser, backend: ScriptedBackend):  # type: ignore[no-untyped-def]
        stack = ExitStack()
        source, destination = stack.enter_context(engine_pair([backend]))
        source.set_selector(chooser)
        a, b = filled_pool(64, 1), filled_pool(64, 2)
        source.register_pool("a", a)
        destination.register_pool("b", b)
        source.connect(destination.listen_address)
        return stack, source, destination, a, b

    def test_a_split_runs_its_parts_and_a_failed_part_waits_for_its_siblings(self) -> None:
        split = candidate(
            PathType.SPLIT_PATH, (("a", "b"), [(0, 0, 3)]), (("a", "x", "b"), [(3, 3, 5)])
        )
        direct = candidate(PathType.DIRECT, (("a", "b"), []))
        chooser = Chooser(split, direct)
        backend = ScriptedBackend([Fault.DESTINATION_FAILS, Fault.DESTINATION_HANGS])
        stack, source, destination, a, b = self.run_with(chooser, backend)
        with stack:
            req = request([(0, 0, 8)])
            report = source.submit(req).wait(10)
            assert_moved(a, b, req)
            assert (report.path_type, report.retries) == (PathType.DIRECT, 1)
            assert backend.closed_halves == 3
            report = source.submit(req).wait(10)
            assert (report.path_type, report.retries) == (PathType.SPLIT_PATH, 0)
            assert [hops for hops, _ in report.routes] == [("a", "b"), ("a", "x", "b")]
            assert (("a", "x", "b"), 5 * LAYOUT.bytes_per_block) in chooser.observed
            counted = source.metrics.snapshot()
            assert counted[PathType.SPLIT_PATH, "tcp"].failures == 2
            assert counted[PathType.DIRECT, "tcp"].retries == 1
            what = [event.what for event in source.events.snapshot(report.transfer)]
            assert what == ["attempt", "completed"]

    def test_generations_follow_their_blocks_into_the_parts(self) -> None:
        split = candidate(
            PathType.SPLIT_PATH, (("a", "b"), [(4, 4, 4)]), (("a", "x", "b"), [(0, 0, 4)])
        )
        stack, source, destination, a, b = self.run_with(Chooser(split), ScriptedBackend())
        with stack:
            a.generations = lambda ids: [10 + i for i in ids]
            b.generations = lambda ids: [20 + i for i in ids]
            req = request(
                [(0, 0, 8)],
                src_generations=tuple(range(10, 18)),
                dst_generations=tuple(range(20, 28)),
            )
            source.submit(req).wait(10)

    def test_no_path_left(self) -> None:
        direct = candidate(PathType.DIRECT, (("a", "b"), []))
        backend = ScriptedBackend([Fault.SOURCE_FAILS])
        stack, source, destination, _, _ = self.run_with(Chooser(direct), backend)
        with stack:
            handle = source.submit(request([(0, 0, 8)]))
            with pytest.raises(Exception, match="the source fails"):
                handle.wait(10)
            assert handle.state is TransferState.FAILED


class TestEnds:
    def test_blocks_in_use_are_not_given_to_another(self) -> None:
        with engine_pair([ScriptedBackend([Fault.DESTINATION_HANGS])]) as (source, destination):
            source.register_pool("a", filled_pool(64, 1))
            destination.register_pool("b", filled_pool(64, 2))
            source.connect(destination.listen_address)
            first = source.submit(request([(0, 8, 4)]))
            while not destination.pinned("b", [9]):
                threading.Event().wait(0.001)
            assert source.pinned("a", [0, 3, 4]) == [0, 3]
            with pytest.raises(BlocksBusy, match="block 8 of b is being written"):
                source.submit(request([(4, 6, 3)])).wait(10)
            source.submit(request([(0, 12, 4)])).wait(10)
            first.cancel()
            first.cancel()
            with pytest.raises(Cancelled):
                first.wait(10)
            assert first.state is TransferState.CANCELLED
            assert source.pinned("a", list(range(64))) == []
            assert destination.pinned("b", list(range(64))) == []

    @pytest.mark.parametrize("fault", [Fault.SOURCE_HANGS, Fault.DESTINATION_HANGS])
    def test_deadline(self, fault: Fault) -> None:
        arrivals = Arrivals()
        with engine_pair([ScriptedBackend([fault])], arrivals=arrivals) as (source, destination):
            source.register_pool("a", filled_pool(64, 1))
            destination.register_pool("b", filled_pool(64, 2))
            source.connect(destination.listen_address)
            handle = source.submit(request([(0, 0, 4)], deadline_s=0.1))
            with pytest.raises(DeadlineExceeded):
                handle.wait(10)
            assert handle.state is TransferState.FAILED
            assert arrivals.wait(handle.transfer).state is TransferState.FAILED
            assert destination.pinned("b", list(range(64))) == []

    def test_close_ends_everything(self) -> None:
        before = set(threading.enumerate())
        arrivals = Arrivals()
        faults = [Fault.SOURCE_HANGS, Fault.DESTINATION_HANGS]
        with engine_pair([ScriptedBackend(faults)], arrivals=arrivals) as (source, destination):
            source.register_pool("a", filled_pool(64, 1))
            destination.register_pool("b", filled_pool(64, 2))
            source.connect(destination.listen_address)
            handles = [source.submit(request([(4 * i, 4 * i, 4)])) for i in range(2)]
            source.close()
            for handle in handles:
                assert handle.state is TransferState.FAILED
                assert isinstance(handle.error, EngineClosed)
                assert arrivals.wait(handle.transfer).state is TransferState.FAILED
        assert set(threading.enumerate()) == before
