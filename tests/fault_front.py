"""`flowkv serve` whose workers meet faults where a test orders them, and come back at once.

python -m tests.fault_front serve ...
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from flowkv_jax.cli import main
from flowkv_jax.cluster.control_plane import ControlPlane
from flowkv_jax.commands import serve_cluster
from flowkv_jax.controller.role import Role
from flowkv_jax.worker.command_line import WorkerCommands
from flowkv_jax.worker.fleet import Fleet, FleetConfig
from flowkv_jax.worker.launcher import LaunchCommand
from tests.fault_rules import FOLDER_VARIABLE, Faults

_QUICK = FleetConfig(restart_pause_s=0.02, max_restart_pause_s=0.1, max_deaths=1000)


def start_faulty_workers() -> None:
    command: Callable[[WorkerCommands, Role, str], LaunchCommand] = WorkerCommands.command

    def faulty(self: WorkerCommands, role: Role, name: str) -> LaunchCommand:
        made = command(self, role, name)
        argv = ["tests.fault_worker" if a == "flowkv_jax.cli" else a for a in made.argv]
        return replace(made, argv=argv)

    WorkerCommands.command = faulty
    serve_cluster.Fleet = partial(Fleet, config=_QUICK)


def tell_of_requests(faults: Faults) -> None:
    """Answer questions: what the front still has to do. Its books are checked on the way."""
    make = ControlPlane.__init__

    def make_and_tell(self: ControlPlane, *args: Any, **options: Any) -> None:
        make(self, *args, **options)

        def look() -> dict[str, Any]:
            dispatcher = self.dispatcher
            dispatcher.check()
            return {
                "num_live": dispatcher.num_live,
                "num_waiting": dispatcher.num_waiting,
                "num_pending": dispatcher.num_pending,
            }

        faults.answer_questions(look)

    ControlPlane.__init__ = make_and_tell


if __name__ == "__main__":
    start_faulty_workers()
    tell_of_requests(Faults(Path(os.environ[FOLDER_VARIABLE]), "front"))
    sys.exit(main(sys.argv[1:]))
