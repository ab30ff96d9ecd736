"""Odd streams, odd files and odd values on the command line: an exit status, never a traceback."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from flowkv_jax import cli
from flowkv_jax.commands import Context
from flowkv_jax.config import EngineConfig, ServeConfig, load_config
from flowkv_jax.errors import ConfigError
from tests.test_cli import FakeEngine


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def context(engine: Any = None, **streams: Any) -> Context:
    made: dict[str, Any] = {"stdin": io.StringIO(), "stdout": io.StringIO()} | streams
    return Context(
        stderr=io.StringIO(), engine_factory=lambda config: engine or FakeEngine(), **made
    )


def run(world: Context, *argv: str) -> int:
    return cli.main([argv[0], "-m", "somewhere", *argv[1:]], world)


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_input_that_is_no_text_is_the_callers_fault(command: str) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(b"a\xff\xfe"), encoding="utf-8")
    world = context(stdin=stdin)
    assert run(world, command) == cli.EXIT_CLIENT
    assert "standard input is not utf-8 text" in world.stderr.getvalue()  # type: ignore[attr-defined]


def test_a_full_disk_is_told_of_without_a_traceback() -> None:
    world = context(stdout=FullDisk())
    assert run(world, "generate", "hello") == cli.EXIT_FAILED
    assert "No space left" in world.stderr.getvalue()  # type: ignore[attr-defined]


def test_closed_streams_are_opened_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    opened = []
    try:
        assert cli.main(["pull", "--list"]) == 0
        opened = [sys.stdin, sys.stdout, sys.stderr]
        assert sys.stdin.read() == ""
    finally:
        for stream in opened:
            stream.close()


def test_a_character_the_encoding_lacks_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    cli._prepare_streams()
    print("\u00e9", flush=True)
    assert raw.getvalue() == b"?\n"


@pytest.mark.parametrize(
    ("argv", "status", "kind", "parameter"),
    [
        (["generate", "--json", "x", "--temperature", "9"], 2, "ValidationError", "temperature"),
        (["generate", "--json", "x", "--config", "/nowhere"], 2, "ConfigError", None),
        (["pull", "--json", "nothing-known"], 2, "NotFoundError", None),
        (["bench", "engine", "--json", "--cells", "none"], 2, "ValidationError", "cells"),
    ],
)
def test_errors_are_json_where_json_was_asked_for(
    argv: list[str], status: int, kind: str, parameter: str | None
) -> None:
    world = context()
    assert cli.main(argv, world) == status
    error = json.loads(world.stdout.getvalue())["error"]  # type: ignore[attr-defined]
    assert (error["type"], error["parameter"]) == (kind, parameter)
    assert error["message"] in world.stderr.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "argv",
    [
        ["generate", "--json", "--no-such-flag"],
        ["bench", "--json"],
        ["bench", "allocator", "--json", "--num-blocks", "many"],
    ],
)
def test_so_are_wrong_command_lines(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == cli.EXIT_CLIENT
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "UsageError"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("scheduler: {1: 2}", "key 1 is no text"),
        ("1: 2", "key 1 is no text"),
        ("scheduler: 5", "scheduler is a section"),
        ("seed: 2001-99-99", "not valid YAML"),
        ("[" * 5000, "not valid YAML"),
        ("request_timeout_s: .nan", "request_timeout_s=nan"),
        ("request_timeout_s: .inf", "request_timeout_s=inf"),
        ("max_num_seqs: 100000000000000000000000", "at most"),
        ("num_blocks: 4294967296", "at most"),
        ("block_size: 1000000000", "at most"),
        ("swap_space_bytes: 1000000000000000000000", "at most"),
        ("max_logprobs: -5", "max_logprobs=-5"),
        ("seed: 100000000000000000000000", "64 bits"),
    ],
)
def test_files_that_configure_nothing_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(EngineConfig, path)
    assert str(path) in str(caught.value)


def test_outer_sections_may_be_left_out_and_sections_may_be_empty(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("scheduler: {max_num_seqs: 3}\ncache:\ngrpc_port: 7\n", encoding="utf-8")
    config = load_config(ServeConfig, path)
    assert config.engine.scheduler.max_num_seqs == 3
    assert config.server.grpc_port == 7
