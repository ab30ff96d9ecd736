"""What runs the clients: the catalogue names what exists, failures are told, nothing stays behind.

The clients themselves run in `make test-clients`.
"""

import ast
import json
import os
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.clients import __main__ as run
from tests.clients.catalogue import CLIENTS, Check, Client
from tests.clients.environments import EnvironmentFailed
from tests.clients.processes import Child
from tests.clients.servers import KINDS, Servers

CHECKS_OF = {
    check.script: run.CHECKS_DIR / f"{check.script}.py"
    for client in CLIENTS.values()
    for check in client.checks
}


@pytest.mark.parametrize("script", CHECKS_OF)
def test_scripts_have_checks_and_run_them(script: str) -> None:
    tree = ast.parse(CHECKS_OF[script].read_text(encoding="utf-8"))
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert sum(name.startswith("check_") for name in names) >= 2
    assert "run_checks(__name__" in ast.unparse(tree.body[-1])


def test_catalogue_names_kinds_of_servers_and_installs_what_it_shows() -> None:
    for client in CLIENTS.values():
        assert any(text.startswith(client.package) for text in client.requirements)
        for check in client.checks:
            assert set(check.servers) <= set(KINDS)


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Client]:
    """One client of scripts in a folder; no environment is made and no server started."""
    fake = {"one": Client("one", "pip", (), (Check("script", servers=()),))}
    monkeypatch.setattr(run, "CLIENTS", fake)
    monkeypatch.setattr(run, "CLIENTS_DIR", tmp_path / "build")
    monkeypatch.setattr(run, "CHECKS_DIR", tmp_path)
    monkeypatch.setattr(run, "python_of", lambda *_: Path(sys.executable))
    monkeypatch.setattr(run, "version_of", lambda *_: "1.0")
    monkeypatch.setattr(run, "write_tokenizer_folder", lambda folder: folder)
    monkeypatch.setattr(Servers, "get", lambda *_: [])
    return fake


@pytest.mark.parametrize(
    ("script", "status", "passed", "failure"),
    [
        ("print('ok a (0.1 s)'); print('ok b (0.1 s)')", 0, 2, None),
        ("print('ok a (0.1 s)'); print('FAILED b: why'); exit(1)", 1, 1, "script.b: why"),
        ("print('ok a'); raise SystemExit(3)", 1, 1, "exit status 3"),
        ("pass", 1, 0, "checked nothing"),
    ],
)
def test_outcome_of_a_check(
    clients: dict[str, Client],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    script: str,
    status: int,
    passed: int,
    failure: str | None,
) -> None:
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    assert run.main(["--json"]) == status
    out, err = capsys.readouterr()
    (result,) = json.loads(out)
    assert result["num_passed"] == passed
    assert [failure in text for text in result["failures"]] == ([] if failure is None else [True])
    assert f"{1 - status} of 1 clients passed" in err
    # What a run that passed has written is of no more use.
    assert len(list((tmp_path / "build").glob("run-*"))) == status


def test_client_that_cannot_be_installed_has_not_run(
    clients: dict[str, Client], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> Path:
        raise EnvironmentFailed("no such package")

    monkeypatch.setattr(run, "python_of", fail)
    assert run.main([]) == 1
    assert "not run: no such package" in capsys.readouterr().err


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("nobody", "openai/nothing"):
        with pytest.raises(SystemExit) as raised:
            run.main([name])
        assert raised.value.code == 2
        assert name in capsys.readouterr().err


def test_ended_child_leaves_no_descendant(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys, time\n"
        "inner = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(inner.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    child = Child(
        [sys.executable, "-c", script],
        tmp_path / "log",
        environ=dict(os.environ),
        folder=tmp_path,
    )
    while not child.output().endswith("\n"):
        assert child.wait(0.05) is None
    inner = psutil.Process(int(child.output()))
    child.end()
    assert child.poll() is not None
    assert psutil.wait_procs([inner], timeout=20)[1] == []
