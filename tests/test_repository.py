"""Promises of the repository's public face: what the README says works, and budgets hold."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from flowkv_jax import cli
from flowkv_jax.config import ServeConfig, load_config
from transfer import Topology

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("flowkv_jax", "transfer", "pallas_kernels")
TEXT_SUFFIXES = {".py", ".md", ".toml", ".yaml", ".txt", ".proto"}
MAX_FILE_LINES = 440  # not blank
MAX_FUNCTION_LINES = 60


def text_files() -> Iterator[Path]:
    """Files that go into the repository (not environments, caches, or build outputs)."""
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [f for f in folders if not f.startswith(".") and f not in ("build", "dist")]
        yield from (Path(folder) / name for name in names if Path(name).suffix in TEXT_SUFFIXES)


def source_files() -> Iterator[Path]:
    for package in PACKAGES:
        yield from (p for p in (ROOT / package).rglob("*.py") if "_pb2" not in p.name)


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads(read("pyproject.toml"))["project"]
    return table


class TestReadme:
    def test_quick_start_is_two_commands(self) -> None:
        section = read("README.md").split("## Quick start")[1].split("\n## ")[0]
        first_block = section.split("```")[1]
        assert first_block.strip().splitlines() == ["make demo", "make test"]

    @pytest.mark.parametrize("name", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"])
    def test_links_lead_somewhere(self, name: str) -> None:
        for target in re.findall(r"\]\(([^)#]+)", read(name)):
            assert target.startswith("https://") or (ROOT / target).exists(), target

    def test_every_command_is_shown(self) -> None:
        shown = set(re.findall(r"^flowkv (\w+)", read("README.md"), flags=re.MULTILINE))
        assert shown == set(cli.COMMANDS)

    def test_python_blocks_compile(self) -> None:
        blocks = re.findall(r"```python\n(.*?)```", read("README.md"), flags=re.DOTALL)
        assert len(blocks) >= 2
        for block in blocks:
            compile(block, "README.md", "exec")


class TestArchitecture:
    def test_every_module_is_named(self) -> None:
        text = read("ARCHITECTURE.md")
        missing = [
            relative(path)
            for path in source_files()
            if path.name != "__init__.py" and not re.search(rf"\b{path.stem}\b", text)
        ]
        assert missing == []


class TestInstallation:
    def test_constraints_meet_the_requirements(self, project: dict[str, Any]) -> None:
        pins = {}
        for line in read("constraints.txt").splitlines():
            if line and not line.startswith("#"):
                requirement = Requirement(line)
                (pin,) = requirement.specifier
                assert pin.operator == "==", line
                pins[canonicalize_name(requirement.name)] = pin.version
        wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
        for text in wanted:
            requirement = Requirement(text)
            assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), text

    def test_one_version(self, project: dict[str, Any]) -> None:
        import flowkv_jax

        assert flowkv_jax.__version__ == project["version"]

    def test_license(self, project: dict[str, Any]) -> None:
        assert project["license"] == "Apache-2.0"
        text = read("LICENSE")
        assert "Apache License" in text and "Version 2.0" in text and len(text) > 11_000

    def test_makefile_lists_its_targets(self) -> None:
        make = shutil.which("make")
        assert make, "make is part of the quick start"
        done = subprocess.run(
            [make, "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        listed = re.findall(r"^ {2}make (\S+)", done.stdout, flags=re.MULTILINE)
        phony = re.findall(r"^\.PHONY: (.*)", read("Makefile"), flags=re.MULTILINE)
        assert sorted(listed) == sorted(phony[0].split())
        assert {"demo", "test", "lint"} <= set(listed)

    def test_continuous_integration_script(self) -> None:
        script = ROOT / ".ci" / "run"
        assert os.access(script, os.X_OK)
        subprocess.run(["bash", "-n", str(script)], check=True, timeout=60)
        assert re.findall(
            r"^make (\w+)", script.read_text(encoding="utf-8"), flags=re.MULTILINE
        ) == [
            "lint",
            "test",
        ]

    def test_importing_the_package_imports_no_jax(self) -> None:
        script = (
            "import sys, flowkv_jax\n"
            "assert not {'jax', 'flax', 'grpc'} & set(sys.modules)\n"
            "assert set(flowkv_jax.__all__) <= set(dir(flowkv_jax))\n"
        )
        subprocess.run([sys.executable, "-c", script], check=True, timeout=60, cwd=ROOT)


class TestFiles:
    def test_no_file_is_long(self) -> None:
        lengths = {
            relative(p): sum(map(bool, p.read_text(encoding="utf-8").splitlines()))
            for p in source_files()
        }
        assert {name: n for name, n in lengths.items() if n > MAX_FILE_LINES} == {}

    def test_every_folder_of_modules_is_a_package(self) -> None:
        # The import contracts do not see into a folder without __init__.py.
        folders = {path.parent for path in source_files()}
        assert [relative(f) for f in folders if not (f / "__init__.py").exists()] == []

    def test_no_function_is_long(self) -> None:
        long = {}
        for path in source_files():
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    body = node.body[1:] if ast.get_docstring(node) else node.body
                    lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
                    if lines > MAX_FUNCTION_LINES:
                        long[f"{relative(path)}:{node.name}"] = lines
        assert long == {}

    def test_no_path_of_one_machine(self) -> None:
        pattern = re.compile(r"(?<![\w.])/(?:home|root|work|Users)/\w")
        found = [
            f"{relative(path)}:{number}"
            for path in text_files()
            if path != Path(__file__)
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
            if pattern.search(line)
        ]
        assert found == []

    def test_no_test_is_skipped(self) -> None:
        pattern = re.compile(r"pytest\.(?:skip|mark\.skip|importorskip)")
        tests = [p for p in (ROOT / "tests").rglob("*.py") if p != Path(__file__)]
        assert [relative(p) for p in tests if pattern.search(p.read_text(encoding="utf-8"))] == []


class TestExamples:
    @pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
    def test_uses_public_names_only(self, path: Path) -> None:
        import flowkv_jax

        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flowkv_jax"):
                assert node.module == "flowkv_jax"
                assert {alias.name for alias in node.names} <= set(flowkv_jax.__all__)

    @pytest.mark.parametrize(
        "path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name
    )
    def test_configurations_load(self, path: Path) -> None:
        if path.name.startswith("links_"):
            assert Topology.from_file(path).nodes
        else:
            load_config(ServeConfig, path)
