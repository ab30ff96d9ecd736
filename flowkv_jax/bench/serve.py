"""`flowkv bench serve`: cells of a workload against a running server, one after the other.

The server is asked for its model first, then a few requests of each shape warm it up. Before and
after each cell its own counters are read. A cell begins when every request of the one before has
ended, so the server is quiet then, if nobody else uses it.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

from flowkv_jax.bench.serve_client import Asking, Counts, LoadClient, open_client
from flowkv_jax.bench.serve_handoff import HandoffRecord, HandoffSource
from flowkv_jax.bench.serve_records import AnswerCheck, CellRun, RequestRecord
from flowkv_jax.bench.serve_workload import Cell, PlannedRequest
from flowkv_jax.checks import bad_value, check_int, check_real
from flowkv_jax.errors import FlowKVError, RetryableRequestError
from flowkv_jax.load import ModelInfo
from flowkv_jax.rpc.client import Client

_UNARY_TIMEOUT_S = 10.0
_LIVE_INTERVAL_S = 0.25
_COUNTERS = ("prefix_cache_queries", "prefix_cache_hits", "num_preemptions")

Say = Callable[[str], None]


class Workload(Protocol):
    """Cells for a model."""

    def cells(self, model: ModelInfo) -> list[Cell]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Where it is, and how to get in; as `flowkv_jax.Client` takes them."""

    target: str
    api_key: str | None = None
    tls: bool = False
    tls_ca_file: str | None = None

    def client(self) -> Client:
        return Client(self.target, api_key=self.api_key, tls=self.tls, tls_ca_file=self.tls_ca_file)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeBench:
    """What to do.

    Attributes:
        num_warmups: requests of each length sent before the first cell, in bursts of 1, 2, 4, ..
        max_duration_s: nothing is sent later than this in a cell; None sends everything.
        num_checked: at most so many completed requests of each cell are asked again at the end,
            one by one, to compare answers; 0 for none.

    Raises:
        ValidationError: a value out of range, or answers to check that are not greedy.
    """

    workload: Workload
    asking: Asking = field(default_factory=Asking)
    num_warmups: int = 7
    max_duration_s: float | None = None
    num_checked: int = 0

    def __post_init__(self) -> None:
        check_int("num_warmups", self.num_warmups, 0)
        check_int("check_answers", self.num_checked, 0)
        check_int("max_retries", self.asking.max_retries, 0)
        check_real("temperature", self.asking.temperature, 0.0, 2.0)
        check_real("timeout", self.asking.timeout_s, 0.0, low_open=True)
        if self.asking.max_concurrency is not None:
            check_int("max_concurrency", self.asking.max_concurrency, 1)
        if self.max_duration_s is not None:
            check_real("max_duration", self.max_duration_s, 0.0, low_open=True)
        if self.num_checked and self.asking.temperature > 0:
            raise bad_value(
                "check_answers",
                self.num_checked,
                f"needs greedy answers, and temperature={self.asking.temperature}; set it to 0",
            )


@dataclass(slots=True)
class ServeRun:
    """What came of it; filled as the run goes on.

    Attributes:
        cells: those begun; the last may be incomplete if `is_interrupted`.
        handoffs: the server's records of them; None if it offers none.
        handoff_error: why some of them are missing.
    """

    model: ModelInfo
    cells: list[CellRun] = field(default_factory=list)
    handoffs: list[HandoffRecord] | None = None
    handoff_error: str | None = None
    is_interrupted: bool = False

    @property
    def num_failed(self) -> int:
        return sum(record.error is not None for cell in self.cells for record in cell.records)

    @property
    def num_different(self) -> int:
        """Answers that came out differently when asked again."""
        checks = [cell.answers for cell in self.cells if cell.answers is not None]
        return sum(check.num_asked - check.num_equal for check in checks)


def run_serve_benchmark(
    bench: ServeBench,
    server: Server,
    *,
    handoffs: HandoffSource | None = None,
    progress: Say = lambda line: None,
    live: Say = lambda line: None,
) -> ServeRun:
    """Run every cell. Ctrl-C ends it early, with what was measured so far.

    Args:
        handoffs: the server's account of its hand-offs, if it has one.
        progress: told of each cell, for good.
        live: told how far it is, several times a second.

    Raises:
        FlowKVError: no server answers, the workload does not fit its model, or a warm-up request
            failed. Requests that fail later are part of the result.
    """
    with server.client() as client:
        model = _model_of(client, server.target)
        cells = bench.workload.cells(model)
        run = ServeRun(model, handoffs=None if handoffs is None else [])
        runner = _Runner(bench, server, client, run, handoffs, progress, live)
        try:
            asyncio.run(runner.run(cells))
        except KeyboardInterrupt:
            run.is_interrupted = True
    return run


def _model_of(client: Client, target: str) -> ModelInfo:
    try:
        return client.model_info(timeout=_UNARY_TIMEOUT_S)
    except (RetryableRequestError, TimeoutError) as error:
        raise RetryableRequestError(
            f"no server answers at {target} ({error}); start one with `flowkv serve`, or say where "
            "it is with --target HOST:PORT"
        ) from error


@dataclass(slots=True)
class _Runner:
    bench: ServeBench
    server: Server
    client: Client
    result: ServeRun
    handoffs: HandoffSource | None
    progress: Say
    live: Say
    name: str = field(default_factory=lambda: f"bench-{uuid.uuid4().hex[:12]}")
    num_handoffs_seen: int = 0

    async def run(self, cells: list[Cell]) -> None:
        async with open_client(
            self.server.target,
            self.bench.asking,
            api_key=self.server.api_key,
            tls=self.server.tls,
            tls_ca_file=self.server.tls_ca_file,
        ) as client:
            await self._warm_up(client, cells)
            await self._fetch_handoffs(keep=False)
            for number, cell in enumerate(cells):
                self.progress(f"{cell.name}: {len(cell.requests)} requests")
                await self._run_cell(client, cell, number, f"{number + 1}/{len(cells)}")
            if self.bench.num_checked:
                for number, cell in enumerate(cells):
                    await self._check_answers(client, cell, number)

    async def _warm_up(self, client: LoadClient, cells: list[Cell]) -> None:
        """Bursts of 1, 2, 4, .. requests of each length and group.

        Raises:
            FlowKVError: one failed.
        """
        shapes: dict[tuple[int | None, str], list[PlannedRequest]] = {}
        for cell in cells:
            for plan in cell.requests:
                shapes.setdefault((cell.input_len, plan.group), []).append(plan)
        number = 0
        for plans in shapes.values():
            for burst in _bursts(self.bench.num_warmups):
                chosen = [plans[i % len(plans)] for i in range(burst)]
                length = len(chosen[0].prompt_token_ids)
                self.live(f"warming up: {burst} at once, {length} prompt tokens")
                names = [f"{self.name}-warm-{number + i}" for i in range(burst)]
                number += burst
                await asyncio.gather(*map(client.answer, chosen, names))

    async def _run_cell(self, client: LoadClient, cell: Cell, number: int, place: str) -> None:
        before = await self._counters()
        records: list[RequestRecord] = []
        limit_s = self.bench.max_duration_s
        plans = [p for p in cell.requests if limit_s is None or p.send_at_s <= limit_s]
        run = CellRun(
            name=cell.name,
            input_len=cell.input_len,
            request_rate=cell.request_rate,
            records=records,
            num_planned=len(cell.requests),
            notes=cell.notes,
        )
        self.result.cells.append(run)
        counts = Counts()
        watch = asyncio.create_task(self._watch(place, cell, counts))
        try:
            await client.send_all(plans, f"{self.name}-{number}", records, counts)
        finally:
            watch.cancel()
        after = await self._counters()
        change = {name: after[name] - before[name] for name in before if name in after}
        self.result.cells[-1] = replace(run, server_change=change)
        await self._fetch_handoffs(keep=True)

    async def _watch(self, place: str, cell: Cell, counts: Counts) -> None:
        while True:
            failed = f", {counts.failed} failed" if counts.failed else ""
            self.live(
                f"cell {place}, {cell.name}: {counts.sent} of {len(cell.requests)} sent, "
                f"{counts.completed} completed{failed}"
            )
            await asyncio.sleep(_LIVE_INTERVAL_S)

    async def _counters(self) -> dict[str, int]:
        """The server's counters; none where it does not say."""
        with suppress(FlowKVError):
            loads = await asyncio.to_thread(self.client.get_loads, timeout=_UNARY_TIMEOUT_S)
            return {name: getattr(loads, name) for name in _COUNTERS}
        return {}

    async def _fetch_handoffs(self, *, keep: bool) -> None:
        if self.handoffs is None:
            return
        try:
            found = await asyncio.to_thread(self.handoffs.fetch, self.num_handoffs_seen)
        except FlowKVError as error:
            self.result.handoff_error = str(error)
            return
        if found:
            self.num_handoffs_seen = found[-1].number + 1
        if keep and self.result.handoffs is not None:
            self.result.handoffs.extend(found)

    async def _check_answers(self, client: LoadClient, cell: Cell, number: int) -> None:
        run = self.result.cells[number]
        chosen = _spread(run.completed, self.bench.num_checked)
        num_equal, different = 0, {}
        for done, record in enumerate(chosen):
            self.live(f"checking answers of {cell.name}, {done + 1} of {len(chosen)}")
            name = f"{self.name}-{number}-check-{done}"
            try:
                again = await client.answer(cell.requests[record.index], name)
            except FlowKVError as error:
                different[record.request_id] = f"asked again, it failed: {error}"
                continue
            if again == record.token_ids:
                num_equal += 1
            else:
                different[record.request_id] = _difference(record.token_ids, again)
        self.result.cells[number] = replace(
            run, answers=AnswerCheck(len(chosen), num_equal, different)
        )


def _bursts(count: int) -> list[int]:
    """1, 2, 4, .. with the sum `count`; the last is what is left."""
    found, size = [], 1
    while count > 0:
        found.append(min(size, count))
        count, size = count - size, 2 * size
    return found


def _spread(records: list[RequestRecord], count: int) -> list[RequestRecord]:
    """`count` of them (or all), from the whole cell evenly."""
    if len(records) <= count:
        return records
    return [records[i * len(records) // count] for i in range(count)]


def _difference(under_load: tuple[int, ...], alone: tuple[int, ...]) -> str:
    for position, (one, other) in enumerate(zip(under_load, alone, strict=False)):
        if one != other:
            return f"token {position}: {one} under load, {other} alone"
    return f"{len(under_load)} tokens under load, {len(alone)} alone"
