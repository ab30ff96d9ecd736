"""`flowkv top`: what it makes of recorded clusters, and the command against a real server."""

import io
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from flowkv_jax import cli
from flowkv_jax.commands import Context
from flowkv_jax.commands.top_picture import Observer, Picture
from flowkv_jax.commands.top_screen import ASCII, UNICODE, render
from flowkv_jax.controller.role import Role
from flowkv_jax.controller.snapshot import NodeState, Regime
from flowkv_jax.rpc.cluster_view import ClusterView
from tests.fake_engine import FakeEngine, served
from tests.recorded_cluster import (
    DECODE,
    HANDOFF,
    NEVER_RAN,
    NOW_S,
    PREFILL,
    RECORD,
    ROUTE,
    SNAPSHOT,
    SWITCH,
    RecordedView,
)

PICTURE = Picture(
    target="127.0.0.1:50051",
    model="smollm2",
    snapshot=SNAPSHOT,
    decisions=(ROUTE, replace(SWITCH, number=2)),
    records=(RECORD, replace(NEVER_RAN, number=2)),
    requests_per_s=0.8,
    tokens_per_s=51.2,
)
AT_80_COLUMNS = """\
flowkv top  smollm2 at 127.0.0.1:50051
regime imbalanced  load: prefill 0.77, decode 0.13  0.8 req/s  51 tok/s

nodes
node      role     run wait swap send recv KV use     frag  C_p  C_d queue
decode-0  decode     1    2    3    0    5 █░░░░  25% 0.50 0.44 0.25  1.2s
          → hybrid
prefill-0 prefill    1    2    3    7    0 ████░  72% 0.50 0.44 0.25  1.2s
prefill-1 prefill    -    -    -    -    - -             - 0.44 0.25  1.2s

last hand-offs
way                  path                 runs/calls reused  MiB transfer ms
prefill-0 → decode-0 Direct/shared_memory        2/1   6/19 14.0        2.50

last decisions
ago kind  of       chosen               why
10s role  decode-0 hybrid               prefill is overloaded and decode is idle
10s route req-1    prefill-0 → decode-0 earliest token; least transfer and load
"""


def shown(picture: Picture, width: int, height: int | None = None, **options: Any) -> str:
    """What is on the screen, without the spaces at the ends of lines."""
    stdout = io.StringIO()
    console = Console(file=stdout, width=width, highlight=False)
    console.print(render(picture, width, height, **options))
    lines = stdout.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    return "".join(f"{line.rstrip()}\n" for line in lines)


def line_of(text: str, beginning: str) -> str:
    (line,) = (line for line in text.splitlines() if line.startswith(beginning))
    return line


class TestScreen:
    def test_at_80_columns(self) -> None:
        assert shown(PICTURE, 80) == AT_80_COLUMNS

    def test_wider_screens_say_more(self) -> None:
        text = shown(PICTURE, 120)
        headings = line_of(text, "node ").split()
        assert headings[-7:] == ["booked", "prefill", "tok/s", "step", "ms", "age", "s"]
        assert line_of(text, "decode-0").endswith("4          2000    26.0   0.1")
        assert line_of(text, "prefill-1").endswith("4          2000       -     -")
        assert "1.00    300     24 5.0s req-1" in text
        assert "least transfer and load (prefill 296 ms, decode 87 ms)" in text
        assert "decode is idle (busy_load 0.77)" in text

    def test_terminals_without_unicode(self) -> None:
        text = shown(PICTURE, 80, symbols=ASCII).replace(UNICODE.ellipsis, "")
        assert text.isascii()
        assert "####.  72%" in text and "-> hybrid" in text
        assert "prefill-0 -> decode-0" in text

    @pytest.mark.parametrize(
        ("change", "plight"),
        [
            ({"state": NodeState.LEAVING}, "leaving"),
            ({"state": NodeState.DRAINED}, "drained"),
            ({"reported_s": NOW_S - 7}, "mute 7.0s"),
            ({"home_role": Role.HYBRID}, "home hybrid"),
            ({"home_role": Role.HYBRID, "reported_s": NOW_S - 70}, "mute 70s"),
        ],
    )
    def test_what_is_not_as_usual(self, change: dict[str, Any], plight: str) -> None:
        node = replace(PREFILL, **change)
        picture = replace(PICTURE, snapshot=replace(SNAPSHOT, nodes=(node,)))
        lines = shown(picture, 80).splitlines()
        (number,) = (i for i, line in enumerate(lines) if line.startswith("prefill-0 prefill"))
        assert lines[number + 1].strip() == plight

    def test_nothing_yet(self) -> None:
        snapshot = replace(SNAPSHOT, regime=Regime.NORMAL, nodes=())
        empty = replace(PICTURE, snapshot=snapshot, decisions=(), records=(NEVER_RAN,))
        text = shown(empty, 80)
        assert text.count("none yet") == 2

    @pytest.mark.parametrize("width", [80, 100, 120, 200])
    @pytest.mark.parametrize("height", [24, 40])
    @pytest.mark.parametrize("remark", [None, "no news for 3 s: " + "gone " * 40])
    def test_a_busy_cluster_fits_the_screen(
        self, width: int, height: int, remark: str | None
    ) -> None:
        nodes = tuple(replace(node, name=f"{node.name}-{i}") for i in range(2) for node in (
            DECODE, PREFILL))  # fmt: skip
        picture = replace(
            PICTURE,
            model="a-model-with-a-name-that-is-really-very-long" * 4,
            snapshot=replace(SNAPSHOT, nodes=nodes),
            decisions=[replace(ROUTE, number=n, subject="req-" + "x" * 99) for n in range(100)],
            records=[replace(RECORD, number=n, request_id="y" * 99) for n in range(100)],
        )
        text = shown(picture, width, height, remark=remark)
        assert len(text.splitlines()) <= height
        assert text.count("earliest token; least transfer and lo") >= 2
        assert text.count("Direct/shared_memory") >= 2

    def test_names_do_not_steer_the_terminal(self) -> None:
        evil = "\x1b[2Jboo\n\x07[red]"
        node = replace(PREFILL, name=evil)
        picture = replace(
            PICTURE,
            model=evil,
            target=evil,
            snapshot=replace(SNAPSHOT, nodes=(node,)),
            decisions=(replace(ROUTE, subject=evil, chosen=evil, reason=evil),),
            records=(
                replace(RECORD, request_id=evil, handoff=replace(HANDOFF, src=evil, path=evil)),
            ),
        )
        text = shown(picture, 200, remark=evil)
        assert "\x1b" not in text and "\x07" not in text
        assert text.count("?[2Jboo??[red]") == 10


class TestPicture:
    def test_routes_leave_room_for_other_decisions(self) -> None:
        decisions = [replace(SWITCH, number=1), replace(SWITCH, number=2)]
        decisions += [replace(ROUTE, number=n) for n in range(3, 50)]
        picture = replace(PICTURE, decisions=decisions)
        assert [one.number for one in picture.notable_decisions(5)] == [49, 48, 47, 2, 1]
        assert [one.number for one in picture.notable_decisions(2)] == [49, 2]
        few = replace(PICTURE, decisions=decisions[:3])
        assert [one.number for one in few.notable_decisions(5)] == [3, 2, 1]
        switches = [replace(SWITCH, number=n) for n in range(1, 9)]
        picture = replace(PICTURE, decisions=switches)
        assert [one.number for one in picture.notable_decisions(3)] == [8, 7, 6]

    def test_as_json(self) -> None:
        document = json.loads(json.dumps(PICTURE.to_dict()))
        assert document["cluster"]["nodes"][0]["next_role"] == "hybrid"
        assert document["decisions"][0]["candidates"][0]["terms"]["queue_s"] == 0.1
        assert document["requests"][0]["handoff"]["data_bytes"] == 14 << 20
        assert document["requests"][1]["handoff"] is None


class TestObserver:
    def test_rates_are_of_the_last_seconds(self) -> None:
        view = RecordedView()
        ended = [(1, NOW_S - 10.5), (2, NOW_S - 9.5), (3, NOW_S - 1.0)]
        view.all_records = [replace(RECORD, number=n, ended_s=end_s) for n, end_s in ended]
        picture = Observer(view, "there", "model").look()
        assert picture.requests_per_s == pytest.approx(0.2)
        assert picture.tokens_per_s == pytest.approx(4.8)
        assert picture.decisions == view.all_decisions

    def test_rates_of_more_than_is_remembered(self) -> None:
        view = RecordedView()
        times = [(n, NOW_S - 5 + n / 1000) for n in range(5000)]
        view.all_records = [replace(RECORD, number=n + 1, ended_s=end_s) for n, end_s in times]
        picture = Observer(view, "there", "model").look()
        assert picture.requests_per_s == pytest.approx(1000, rel=0.01)

    def test_records_are_followed_over_gaps_and_other_servers(self) -> None:
        view = RecordedView()
        observer = Observer(view, "there", "model")

        def numbers() -> list[int]:
            return [record.number for record in observer.look().records]

        assert numbers() == numbers() == [4, 5, 6, 7, 8]
        view.all_records = [replace(RECORD, number=n) for n in (20, 21)]
        assert numbers() == [4, 5, 6, 7, 8, 20, 21]
        view.all_records = [replace(RECORD, number=n) for n in (1, 2)]
        assert numbers() == [1, 2]
        view.all_records = []
        assert numbers() == []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def top(address: str, *argv: str, stdout: io.StringIO | None = None) -> tuple[int, str, str]:
    """Exit status, standard output and error of the command, in this process."""
    stdout, stderr = stdout or io.StringIO(), io.StringIO()
    context = Context(stdin=io.StringIO(), stdout=stdout, stderr=stderr)
    status = cli.main(["top", "--target", address, *argv], context)
    return status, stdout.getvalue(), stderr.getvalue()


def engine_with(view: ClusterView) -> FakeEngine:
    engine = FakeEngine()
    engine.cluster = view
    return engine


class TestCommand:
    def test_without_a_terminal_it_looks_once(self) -> None:
        with served(engine_with(RecordedView())) as address:
            status, text, errors = top(address)
        assert (status, errors) == (0, "")
        assert text.startswith(f"flowkv top  fake at {address}")
        assert "\x1b" not in text and "prefill-0 → decode-0" in text

    def test_json(self) -> None:
        with served(engine_with(RecordedView())) as address:
            status, text, _ = top(address, "--once", "--json")
        document = json.loads(text)
        assert status == 0
        assert (document["target"], document["model"]) == (address, "fake")
        assert document["cluster"] == SNAPSHOT.to_dict()
        assert [one["number"] for one in document["requests"]] == [4, 5, 6, 7, 8]

    def test_live_until_ctrl_c_and_through_an_outage(self, monkeypatch: pytest.MonkeyPatch) -> None:
        view, terminal, slept = RecordedView(), Terminal(), []
        healthy = view.decisions

        def fail(limit: int, after: int | None = None) -> Any:
            raise RuntimeError("broken")

        def sleep(seconds: float) -> None:
            slept.append(seconds)
            view.decisions = fail if len(slept) == 1 else healthy  # type: ignore[method-assign]
            if len(slept) == 3:
                raise KeyboardInterrupt

        monkeypatch.setattr("flowkv_jax.commands.top.time.sleep", sleep)
        with served(engine_with(view)) as address:
            status, text, errors = top(address, "--interval", "0.5", stdout=terminal)
        assert (status, errors, slept) == (0, "", [0.5, 0.5, 0.5])
        assert text.count("\x1b[?1049h") == text.count("\x1b[?1049l") == 1
        frames = text.split("\x1b[H")
        told = ["no news for" in frame for frame in frames if "regime" in frame]
        assert told == [False, True, False]

    def test_once_in_a_terminal(self) -> None:
        with served(engine_with(RecordedView())) as address:
            status, text, _ = top(address, "--once", stdout=Terminal())
        assert status == 0 and "\x1b[?1049h" not in text and "prefill-0" in text

    @pytest.mark.parametrize("argv", [(), ("--json",)])
    def test_a_server_without_the_service(self, argv: tuple[str, ...]) -> None:
        with served(FakeEngine()) as address:
            status, text, errors = top(address, *argv)
        assert status == 2 and "does not offer flowkv.v1.Cluster" in errors
        assert ("UnprocessableError" in text) == bool(argv)

    def test_no_server(self) -> None:
        status, _, errors = top("127.0.0.1:1")
        assert status == 1 and "no server answers at 127.0.0.1:1" in errors
        assert "flowkv serve" in errors

    @pytest.mark.parametrize("interval", ["0", "61", "nan"])
    def test_bad_intervals(self, interval: str) -> None:
        status, _, errors = top("127.0.0.1:1", "--interval", interval)
        assert status == 2 and "interval=" in errors

    @pytest.mark.parametrize(
        ("environ", "status", "words"),
        [({"FLOWKV_API_KEY": "sesame"}, 0, ""), ({}, 2, "needs a known token")],
    )
    def test_the_token(
        self,
        environ: Mapping[str, str],
        status: int,
        words: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        with served(engine_with(RecordedView()), {"FLOWKV_API_KEY": "sesame"}) as address:
            found, _, errors = top(address)
        assert found == status and words in errors
