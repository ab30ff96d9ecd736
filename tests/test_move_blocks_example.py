"""examples/move_blocks.py runs as its docstring says, and says what it did."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(("arguments", "backend"), [((), "shared_memory"), (("tcp",), "tcp")])
def test_example(arguments: tuple[str, ...], backend: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "examples/move_blocks.py", *arguments],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "32 blocks in 2 runs: 2 calls" in done.stdout
    assert f"by {backend} over prefill/kv > decode/kv" in done.stdout
