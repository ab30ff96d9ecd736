"""Faults that a test orders in another process, and what it asks of it. No JAX.

A folder joins them:

    NAME.rules       the test orders; the process takes it (and so a later process of the same
                     name meets nothing)
    NAME.fired       the process tells which rules have come true, before it acts
    POINT.shared     somebody has come to a rule that is for one of several
    NAME.ask         the test asks for the process's state; NAME.answer is the reply
"""

from __future__ import annotations

import enum
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.cluster_fakes import wait_for

FOLDER_VARIABLE = "FLOWKV_TEST_FAULTS"
_POLL_S = 0.02


class Action(enum.Enum):
    KILL = "kill"
    STOP = "stop"
    DROP = "drop"
    DELAY = "delay"
    CORRUPT = "corrupt"
    FAIL = "fail"


@dataclass
class Rule:
    """From the `nth` time on that `point` is reached, `count` times (0: for ever), `action`.

    Attributes:
        seconds: of a delay.
        shared: ordered to several processes; only the first that comes to it acts.
    """

    point: str
    action: Action = Action.KILL
    nth: int = 1
    count: int = 1
    seconds: float = 0.0
    shared: bool = False


class Faults:
    """The process's side."""

    def __init__(self, folder: Path, name: str) -> None:
        self._base = folder / name
        self._rules: list[Rule] = []
        self._lock = threading.Lock()

    def reached(self, point: str) -> Action | None:
        """Do what was ordered for this moment. DROP, CORRUPT and FAIL are the caller's to carry
        out."""
        with self._lock:
            self._take_orders()
            due = self._due(point)
        if due is None:
            return None
        with self._base.with_suffix(".fired").open("a") as file:
            file.write(f"{point}\n")
        if due.action is Action.DELAY:
            time.sleep(due.seconds)
        elif due.action in (Action.KILL, Action.STOP):
            number = signal.SIGKILL if due.action is Action.KILL else signal.SIGSTOP
            os.kill(os.getpid(), number)
        return due.action

    def answer_questions(self, state: Callable[[], dict[str, Any]]) -> None:
        """Reply to every question with `state()`, in a thread of its own, for ever."""

        def run() -> None:
            ask = self._base.with_suffix(".ask")
            while True:
                time.sleep(_POLL_S)
                if ask.exists():
                    number = ask.read_text()
                    ask.unlink()
                    try:
                        told = state()
                    except Exception as error:
                        told = {"error": repr(error)}
                    _write(self._base.with_suffix(".answer"), json.dumps([number, told]))

        threading.Thread(target=run, name="test-questions", daemon=True).start()

    def _take_orders(self) -> None:
        orders, taken = self._base.with_suffix(".rules"), self._base.with_suffix(".taken")
        if orders.exists():
            orders.rename(taken)
            told = json.loads(taken.read_text())
            self._rules = [Rule(**fields | {"action": Action(fields["action"])}) for fields in told]

    def _due(self, point: str) -> Rule | None:
        for rule in self._rules:
            if rule.point == point:
                rule.nth -= 1
                if rule.nth < 1:
                    rule.count -= 1
                    if rule.count == 0:
                        self._rules.remove(rule)
                    return rule if not rule.shared or self._is_first(point) else None
        return None

    def _is_first(self, point: str) -> bool:
        try:
            self._base.with_name(f"{point}.shared").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


class FaultFolder:
    """The test's side."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._num_questions = 0

    def order(self, name: str, rules: Iterable[Rule]) -> None:
        """Have a process meet these faults, and none that were ordered before."""
        (self.folder / f"{name}.fired").unlink(missing_ok=True)
        fields = [asdict(rule) | {"action": rule.action.value} for rule in rules]
        _write(self.folder / f"{name}.rules", json.dumps(fields))

    def share_anew(self) -> None:
        """What comes to shared rules from now on is the first again."""
        for path in self.folder.glob("*.shared"):
            path.unlink()

    def fired(self, name: str) -> list[str]:
        """The points of the rules that came true since they were ordered."""
        path = self.folder / f"{name}.fired"
        return path.read_text().split() if path.exists() else []

    def ask(self, name: str) -> dict[str, Any]:
        """The state of a process; waits for it."""
        self._num_questions += 1
        number = str(self._num_questions)
        question, answer = self.folder / f"{name}.ask", self.folder / f"{name}.answer"
        _write(question, number)

        def read() -> dict[str, Any] | None:
            # A process that was killed in between leaves the question to its successor.
            told = json.loads(answer.read_text()) if answer.exists() else [None, None]
            return told[1] if told[0] == number else None

        return wait_for(read, f"{name} answers")


def _write(path: Path, text: str) -> None:
    """At once, for those who look."""
    part = path.with_suffix(f"{path.suffix}.part")
    part.write_text(text)
    part.rename(path)
