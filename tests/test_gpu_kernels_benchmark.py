"""The benchmark of the GPU kernels at its smallest sizes: it checks all, and finds faults."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import gpu_kernels, kernel_cases, kernel_checks
from benchmarks.kernel_cases import LAYOUTS, LLAMA_8B, LLAMA_70B_TP4, TINY, CaseMaker
from pallas_kernels import block_copy, kv_write
from pallas_kernels.paged_attention import gpu, hopper
from tests.triton_modules import triton_modules

KERNELS = {"kv_write", "slice_run", "put_run", "gather_blocks", "scatter_blocks"}
ATTENTION = {
    ("decode", "reference"),
    ("decode", "xla"),
    ("decode", "gpu"),
    ("decode", "hopper"),
    ("prefill", "reference"),
    ("prefill", "xla"),
    ("prefill", "gpu"),
}


def run(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    file = tmp_path / "report.json"
    status = gpu_kernels.main(["--quick", "--json", str(file), *arguments])
    return status, json.loads(file.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def block_major(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run over one of the two layouts reports."""
    status, report = run(tmp_path_factory.mktemp("all"), "--only", "Block-Major", "--seed", "7")
    assert status == 0
    return report


def test_every_kernel_is_checked(block_major: dict[str, Any]):
    checked = {(check["kernel"], check["implementation"]) for check in block_major["checks"]}
    copied = {(kernel, name) for kernel in KERNELS for name in ("xla", "gpu")}
    assert checked == ATTENTION | copied | {("kv_write", "reference")}
    for check in block_major["checks"]:
        assert check["status"] == "ok", check
        assert 0 <= check["error"] <= check["bound"]


def test_every_kernel_is_timed_beside_plain_xla(block_major: dict[str, Any]):
    timed = {(case["name"].split()[0], case["implementation"]) for case in block_major["timings"]}
    assert timed == {
        (kernel, name) for kernel in KERNELS | {"decode", "prefill"} for name in ("gpu", "xla")
    }
    assert {case["table"] for case in block_major["timings"]} == {"kernels", "splits"}
    for case in block_major["timings"]:
        assert case["status"] == "ok", case
        assert len(case["samples_s"]) >= 5
        assert min(case["samples_s"]) <= case["median_s"] <= max(case["samples_s"])
        assert case["bytes_per_s"] == pytest.approx(case["bytes"] / case["median_s"])
        share = case["bytes_per_s"] / block_major["ceilings"]["copy_bytes_per_s"]
        assert case["share_of_copy_bandwidth"] == pytest.approx(share)


def test_the_report_says_where_it_comes_from(block_major: dict[str, Any]):
    assert block_major["seed"] == 7
    assert block_major["ok"]
    assert not block_major["times_mean_something"]
    assert {"device", "jax", "numpy", "python", "commit"} <= set(block_major["environment"])
    assert block_major["ceilings"]["matmul_flops_per_s"] > 0


def test_work_is_counted_as_by_hand():
    [case] = [
        case
        for case in CaseMaker(LLAMA_8B, "block-major", 8192, kernel_cases.QUICK).kernels()
        if case.implementation == "gpu" and case.name == "decode 64 x 2048"
    ]
    assert case.bytes == 64 * (2048 * 2 * 8 * 128 + 2 * 32 * 128) * 2
    assert case.flops == 64 * 2048 * 32 * 128 * 2 * 2
    assert case.num_blocks == 64 * 128


def unwritten_padding(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Leaves what came before in the place of padding."""
    return lambda *x, **options: attend(*x, **options).at[1].set(jnp.nan)


def off_by_a_little(attend: Callable[..., Any]) -> Callable[..., Any]:
    """One head in the mirror."""
    return lambda *x, **options: attend(*x, **options).at[:, :, 0].multiply(-1)


def next_layer(write: Callable[..., Any]) -> Callable[..., Any]:
    return lambda kv, layer, *x, **options: write(kv, layer - 1, *x, **options)


def one_too_far(copy: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *x, **options: copy(*x[:-1], x[-1] + 1, **options)


@pytest.mark.parametrize(
    ("module", "name", "breaks", "only"),
    [
        (gpu, "paged_attention", unwritten_padding, "block-major decode gpu"),
        (gpu, "paged_attention", off_by_a_little, "block-major prefill gpu"),
        (kv_write, "kv_write", next_layer, "block-major kv_write gpu"),
        (block_copy, "slice_run", one_too_far, "block-major slice_run gpu"),
        (block_copy, "scatter_blocks", one_too_far, "layer-major scatter_blocks gpu"),
    ],
)
def test_a_wrong_kernel_is_found(
    module: Any,
    name: str,
    breaks: Callable[..., Any],
    only: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(module, name, breaks(getattr(module, name)))
    status, report = run(tmp_path, "--only", only)
    assert status == 1
    assert not report["ok"]
    [check] = report["checks"]
    assert check["status"] == "wrong"
    assert f"wrong: {check['title']}: error" in capsys.readouterr().out


def test_a_kernel_that_fails_leaves_the_others_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such\ninstruction")

    monkeypatch.setattr(block_copy, "gather_blocks", fail)
    only = ("layer-major gather_blocks", "layer-major slice_run")
    status, report = run(tmp_path, "--only", only[0], "--only", only[1])
    assert status == 1
    found = {case["name"]: case["status"] for case in report["timings"]}
    assert found == {"gather_blocks 2": "failed", "slice_run 2": "ok"}
    assert [check["status"] for check in report["checks"]].count("failed") == 2
    assert "gather_blocks 2 gpu: RuntimeError: no such instruction\n" in capsys.readouterr().out


def test_a_refusal_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hopper, "unsupported", lambda *_: "compute capability 8.0 is not 9.x")
    status, report = run(tmp_path, "--only", "hopper")
    assert status == 0
    [check] = report["checks"]
    assert check["status"] == "refused"
    assert "compute capability 8.0" in check["message"]


def test_what_has_not_begun_in_time_is_skipped(tmp_path: Path):
    status, report = run(tmp_path, "--limit-s", "0")
    assert status == 0
    assert {result["status"] for result in report["checks"] + report["timings"]} == {"skipped"}


def test_cases_too_large_for_the_pool_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    small = replace(kernel_cases.SMALLEST, most_pool_bytes=3 * TINY.layout.bytes_per_block)
    monkeypatch.setattr(kernel_cases, "SMALLEST", small)
    status, report = run(tmp_path, "--only", "layer-major decode 2 x 48")
    assert status == 0
    assert {case["status"] for case in report["timings"]} == {"skipped"}
    assert "needs 6 blocks, the pool has 3" in capsys.readouterr().out


@pytest.mark.parametrize("kernel", ["decode", "kv_write", "scatter_blocks"])
def test_blocks_at_the_end_of_a_pool_are_checked(kernel: str, monkeypatch: pytest.MonkeyPatch):
    """With a pool of little more than a hundred thousand elements in place of billions."""
    [check] = [
        check
        for check in kernel_checks.huge_pool_checks(TINY, kernel_checks.SMALLEST, 100_000)
        if (check.kernel, check.implementation, check.layout) == (kernel, "gpu", "layer-major")
    ]
    assert check.spare_blocks > 0
    assert check.error(np.random.default_rng()) <= check.bound
    if kernel == "scatter_blocks":
        monkeypatch.setattr(block_copy, kernel, one_too_far(block_copy.scatter_blocks))
        assert check.error(np.random.default_rng()) > check.bound


@pytest.mark.parametrize("model", [LLAMA_8B, LLAMA_70B_TP4], ids=lambda model: model.name)
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_what_is_timed_on_a_gpu_lowers_for_one(model: kernel_cases.Model, layout: str):
    num_blocks = kernel_cases.FULL.most_pool_bytes // model.layout.bytes_per_block
    maker = CaseMaker(model, layout, num_blocks, kernel_cases.FULL, interpret=False)
    cases = [case for case in (*maker.kernels(), *maker.splits()) if case.implementation == "gpu"]
    programs = {case.program: case for case in cases}
    assert len(programs) >= 10
    for program, case in programs.items():
        # One kernel, which newer versions of JAX may repeat for each call in the chain.
        assert triton_modules(program.function, *program.shapes), case.title


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "nothing of the kind"], "matches nothing"),
        (["--json", "no/such/folder/report.json"], "there is no such folder"),
        (["--seed", "-1"], "--seed -1 is outside"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        gpu_kernels.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_runs_as_a_file_and_explains_itself():
    script = Path(gpu_kernels.__file__)
    done = subprocess.run(
        [sys.executable, str(script), "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=script.parent,
    )
    assert done.returncode == 0, done.stderr
    for text in ("--only NAME", "--quick", "--json FILE", "--seed", "layer-major", "Exit status"):
        assert text in done.stdout


@pytest.mark.parametrize(
    ("free_bytes", "huge_elements"), [(100 << 30, 2**32), (20 << 30, 2**31), (8 << 30, 0)]
)
def test_on_a_gpu_all_kernels_are_checked_in_pools_as_huge_as_fit(
    free_bytes: int, huge_elements: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(gpu_kernels, "_has_gpu", lambda: True)
    monkeypatch.setattr(gpu_kernels, "free_bytes", lambda: free_bytes)
    options = gpu_kernels.Options(quick=False, seed=0, only=(), end_s=0)
    checks = [result.check for result in gpu_kernels.run_checks(options)]
    assert len({check.title for check in checks}) == len(checks)
    huge = [check for check in checks if check.spare_blocks]
    block_elements = LLAMA_8B.layout.bytes_per_block // 2 * 3 // LLAMA_8B.layout.num_layers
    for check in huge:
        assert (check.spare_blocks + 24) * block_elements > huge_elements
    kernels = {(check.kernel, check.implementation, check.layout) for check in huge}
    assert len(kernels) == len(huge) == (15 if huge_elements else 0)
