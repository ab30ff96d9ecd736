"""The example runs as its first lines say, and shows what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run(*arguments: str) -> list[str]:
    # Not as an installed package: from a checkout, as the example's first lines have it.
    done = subprocess.run(
        [sys.executable, "-W", "error", "examples/adaptive_transfer.py", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def squeezed(line: str) -> str:
    """With two spaces between columns, however many there were."""
    return re.sub(r" {2,}", "  ", line)


def test_mock() -> None:
    lines = run("--mock")
    rows = lines[1:-1:2]
    chosen = [line.split("  ")[-1] for line in rows]
    assert chosen == [
        "Direct: gpu0 > gpu7",
        "NVLinkRelay: gpu0 > gpu1 > gpu7",
        "NVLinkRelay: gpu0 > gpu1 > gpu7",
        "Direct: gpu0 > gpu7",
        "SplitPath: gpu0 > gpu7 + gpu0 > gpu1 > gpu7",
        "StorageRelay: gpu0 > storage > gpu7",
    ]
    spare = [tuple(map(float, line.split("  ")[-3:-1])) for line in map(squeezed, rows)]
    assert spare == [(25, 25), (3.8, 25), (15, 25), (15, 15), (12.5, 25), (0.8, 3)]
    assert lines[-1].startswith("Decision: median ")


def test_this_machine() -> None:
    lines = run("--size-mb", "1")
    assert lines[0].startswith("Topology(")
    assert "Weighed: " in lines[-2]
