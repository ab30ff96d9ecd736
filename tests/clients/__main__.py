"""`python -m tests.clients [NAME ...] [--keep] [--json]`: run the checks; see the package."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.clients.catalogue import CLIENTS, QUIET, Check, Client
from tests.clients.environments import CLIENTS_DIR, EnvironmentFailed, python_of, version_of
from tests.clients.processes import Child
from tests.clients.servers import ServerFailed, Servers
from tests.clients.tokenizer_folder import write_tokenizer_folder

CHECKS_DIR = Path(__file__).parent / "checks"
_RESULT = re.compile(r"^(ok|FAILED) (.*)$", re.MULTILINE)


@dataclass
class Result:
    """What became of one client.

    Attributes:
        not_run: why it could not be tried; None if it was.
        failures: one text a check that failed.
    """

    client: str
    version: str = "-"
    num_passed: int = 0
    failures: list[str] = field(default_factory=list)
    not_run: str | None = None
    seconds: float = 0.0

    @property
    def has_passed(self) -> bool:
        return self.not_run is None and not self.failures and self.num_passed > 0

    def line(self) -> str:
        """For a person."""
        if self.not_run is not None:
            outcome = f"not run: {self.not_run}"
        else:
            total = self.num_passed + len(self.failures)
            outcome = f"{self.num_passed}/{total} checks passed"
        lines = [f"{self.client:<14} {self.version:<12} {outcome}  ({self.seconds:.0f} s)"]
        return "\n    ".join(lines + self.failures)


class Run:
    """One run over several clients.

    Args:
        folder: an existing folder for logs and what the checks write.
        verbose: show the checks' own output too.
    """

    def __init__(self, folder: Path, *, verbose: bool) -> None:
        self._folder = folder
        self._servers = Servers(folder)
        self._verbose = verbose
        self._child: Child | None = None
        self._tokenizer = write_tokenizer_folder(folder / "tokenizer")

    def all(self, clients: list[Client], *, keep_servers: bool) -> list[Result]:
        """Check every client, printing a line for each; servers end after their last use."""
        results = []
        for position, client in enumerate(clients):
            began_at = time.monotonic()
            result = self._one(client)
            result.seconds = time.monotonic() - began_at
            print(result.line(), file=sys.stderr, flush=True)
            results.append(result)
            later = clients if keep_servers else clients[position + 1 :]
            self._servers.keep_only(
                {kind for other in later for check in other.checks for kind in check.servers}
            )
        return results

    def wait(self) -> None:
        """Return when the terminal interrupts."""
        for server in self._servers.running():
            print(f"{server.kind}: {server.describe()}", file=sys.stderr)
        print("Ctrl-C ends the servers", file=sys.stderr, flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()

    def end(self) -> None:
        """End every process that the run started."""
        if self._child is not None:
            self._child.end()
        self._servers.end()

    def _one(self, client: Client) -> Result:
        result = Result(client.name)
        if client.unavailable is not None:
            result.not_run = client.unavailable
            return result
        try:
            python = python_of(client.name, client.requirements)
            result.version = version_of(python, client.package)
        except EnvironmentFailed as error:
            result.not_run = str(error)
            return result
        for check in client.checks:
            try:
                self._check(client, check, python, result)
            except ServerFailed as error:
                result.failures.append(f"{check.script}: {error}")
        return result

    def _check(self, client: Client, check: Check, python: Path, result: Result) -> None:
        servers = self._servers.get(check.servers)
        where = "+".join(check.servers)
        name = f"{client.name}-{check.script}-{where}"
        scratch = self._folder / name
        scratch.mkdir()
        surroundings = {
            "servers": {server.kind: server.describe() for server in servers},
            "model": servers[0].model if servers else "",
            "tokenizer": str(self._tokenizer),
            "scratch": str(scratch),
        }
        self._child = Child(
            [str(python), str(CHECKS_DIR / f"{check.script}.py")],
            self._folder / f"{name}.log",
            environ=_environ(client, surroundings),
            folder=scratch,
        )
        status = self._child.wait(check.timeout_s)
        self._child.end()
        output = self._child.output()
        self._child = None
        if self._verbose:
            print(output, file=sys.stderr, flush=True)
        found = _RESULT.findall(output)
        result.num_passed += sum(word == "ok" for word, _ in found)
        failures = [f"[{where}] {check.script}.{text}" for word, text in found if word != "ok"]
        if status is None:
            failures.append(f"[{where}] {check.script}: not done after {check.timeout_s:g} s")
        elif status != 0 and not failures:
            failures.append(f"[{where}] {check.script}: exit status {status}: {_tail(output)}")
        elif status == 0 and not found:
            failures.append(f"[{where}] {check.script}: checked nothing")
        dead = self._servers.take_dead(check.servers)
        if not check.ends_servers:
            failures += [f"[{where}] {check.script}: {line}" for line in dead]
        result.failures += failures


def _environ(client: Client, surroundings: dict[str, Any]) -> dict[str, str]:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    for key, value in {**QUIET, **client.environ}.items():
        environ.pop(key, None)
        if value is not None:
            environ[key] = value
    # The server is on this machine, whatever reaches the registry.
    for key in ("no_proxy", "NO_PROXY"):
        environ[key] = f"{environ.get(key, '')},127.0.0.1,localhost".lstrip(",")
    environ["FLOWKV_CHECK"] = json.dumps(surroundings)
    environ["PYTHONUNBUFFERED"] = "1"
    return environ


def _tail(output: str) -> str:
    return " ".join(output.split())[-400:]


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.clients", description="Check flowkv serve with clients people have."
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="a client, or CLIENT/CHECK for one of its checks; default: all clients",
    )
    parser.add_argument("--list", action="store_true", help="list the clients and do nothing")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--verbose", action="store_true", help="show the checks' own output")
    parser.add_argument(
        "--keep",
        action="store_true",
        help="leave the servers up at the end, to look at by hand, until Ctrl-C",
    )
    arguments = parser.parse_args(argv)
    try:
        arguments.clients = [_wanted(name) for name in arguments.names] or list(CLIENTS.values())
    except KeyError as error:
        parser.error(f"unknown: {error}; clients: {', '.join(CLIENTS)}")
    return arguments


def _wanted(name: str) -> Client:
    """A client with all its checks, or with one.

    Raises:
        KeyError: there is no such client, or no such check of it.
    """
    client_name, _, script = name.partition("/")
    client = CLIENTS[client_name]
    if not script:
        return client
    checks = tuple(check for check in client.checks if check.script == script)
    if not checks:
        raise KeyError(name)
    return replace(client, checks=checks)


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 if every client that was asked for was tried and passed."""
    arguments = _arguments(argv)
    if arguments.list:
        for client in CLIENTS.values():
            scripts = dict.fromkeys(check.script for check in client.checks)
            print(f"{client.name:<14} {' '.join(scripts):<50} {' '.join(client.requirements)}")
        return 0
    # A terminated run ends its children as an interrupted one does.
    earlier = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    CLIENTS_DIR.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=CLIENTS_DIR))
    run = Run(folder, verbose=arguments.verbose)
    try:
        results = run.all(arguments.clients, keep_servers=arguments.keep)
        if arguments.keep:
            run.wait()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        run.end()
        signal.signal(signal.SIGTERM, earlier)
    if arguments.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
    num_passed = sum(result.has_passed for result in results)
    print(f"{num_passed} of {len(results)} clients passed", file=sys.stderr)
    if num_passed < len(results):
        print(f"logs: {folder}", file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
