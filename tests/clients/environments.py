"""One virtual environment for each client, under `build/clients/NAME/venv`.

uv makes them: it shares files between environments, so the sixth client that wants transformers
costs a second and no disk. It is fetched with pip into an environment of its own. A stamp with
the requirements' text says that an environment is whole.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CLIENTS_DIR = ROOT / "build" / "clients"
INSTALL_TIMEOUT_S = 1800.0


class EnvironmentFailed(Exception):
    """A client's environment cannot be made; the text says what the installer said."""


def python_of(client: str, requirements: tuple[str, ...]) -> Path:
    """The interpreter of a client's environment, made now unless it is there.

    Raises:
        EnvironmentFailed: the installer failed.
    """
    folder = CLIENTS_DIR / client
    python, stamp = folder / "venv" / "bin" / "python", folder / "installed.txt"
    wanted = "\n".join((sys.version, str(folder), *requirements))
    folder.mkdir(parents=True, exist_ok=True)
    with (CLIENTS_DIR / "lock").open("ab") as lock:
        # Of two runs that want an environment, one makes it and one waits.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if python.exists() and stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
            return python
        stamp.unlink(missing_ok=True)
        uv = _uv()
        _run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, folder / "venv"])
        _run([uv, "pip", "install", "--quiet", "--python", python, *requirements])
        stamp.write_text(wanted, encoding="utf-8")
    return python


def version_of(python: Path, package: str) -> str:
    """Version of an installed package."""
    code = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"
    return _run([python, "-c", code, package]).strip()


def _uv() -> Path:
    uv = CLIENTS_DIR / "uv" / "bin" / "uv"
    if not uv.exists():
        _run([sys.executable, "-m", "venv", CLIENTS_DIR / "uv"])
        pip = [CLIENTS_DIR / "uv" / "bin" / "python", "-m", "pip", "install", "--quiet"]
        _run([*pip, "--disable-pip-version-check", "uv"])
    return uv


def _run(command: list[str | Path]) -> str:
    environ = dict(os.environ)
    # uv does not read pip's settings; wheels that lie on the machine are worth knowing.
    if "UV_FIND_LINKS" not in environ and environ.get("PIP_FIND_LINKS"):
        environ["UV_FIND_LINKS"] = ",".join(environ["PIP_FIND_LINKS"].split())
    try:
        done = subprocess.run(
            list(map(str, command)),
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=INSTALL_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentFailed(str(error)) from error
    if done.returncode != 0:
        tail = " ".join((done.stderr or done.stdout).split())[-600:]
        raise EnvironmentFailed(f"{Path(command[0]).name} {command[1]} failed: {tail}")
    return done.stdout
