"""`flowkv worker`: joins by itself, finds a new front, says why it cannot; how fronts start it."""

from __future__ import annotations

import argparse
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from flowkv_jax import Client, Engine, SamplingParams
from flowkv_jax.cli import main
from flowkv_jax.cluster.config import ClusterConfig, parse_cpus
from flowkv_jax.cluster.membership import Membership
from flowkv_jax.cluster.secret import SECRET_VARIABLE, read_secret
from flowkv_jax.commands.options import add_config_arguments, config_from_args
from flowkv_jax.commands.worker import OMIT, parse_address
from flowkv_jax.config import ServeConfig, load_config
from flowkv_jax.controller.role import Role
from flowkv_jax.errors import ConfigError, FlowKVError
from flowkv_jax.worker.command_line import (
    Share,
    WorkerCommands,
    flags_of,
    machine_shares,
    visible_gpus,
)
from tests.cluster_fakes import SECRET, VERSION, RecordingListener, wait_for
from tests.cluster_serve import ROOT, Front, environment, flowkv, serving

SIZES = ("--max-num-seqs=4", "--max-model-len=1024", "--num-blocks=128", "--debug", "--no-warmup")
PROMPT = {"prompt_token_ids": list(range(7, 60))}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=900, ignore_eos=True)


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return environment(tmp_path_factory.mktemp("cache"), **{SECRET_VARIABLE: SECRET.decode()})


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[str], Path]) -> str:
    return str(tiny_model("gqa_tied"))


@pytest.fixture(scope="module")
def expected(model: str) -> Iterator[list[int]]:
    with Engine(model, max_num_seqs=4, max_model_len=1024, num_blocks=128) as engine:
        yield engine.generate(PROMPT, GREEDY)[0].outputs[0].token_ids


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def is_whole(client: Client) -> bool:
    """Two nodes are there and hold nothing."""
    try:
        loads = client.get_loads()
        num_nodes = len(client.cluster.snapshot().nodes)
    except FlowKVError:
        return False
    return num_nodes == 2 and loads.num_blocks == loads.num_free_blocks == 256


def test_workers_that_join_by_themselves_find_a_new_front(
    model: str, env: dict[str, str], expected: list[int]
) -> None:
    port = free_port()
    nodes = ("--workers=join", "--prefill-nodes=1", "--decode-nodes=1")
    front_arguments = (f"--model={model}", f"--cluster-port={port}", *nodes, *SIZES)
    worker_arguments = ("worker", f"--controller=127.0.0.1:{port}", f"--model={model}", *SIZES)
    with (
        flowkv(*worker_arguments, "--role=prefill", env=env) as prefill,
        flowkv(*worker_arguments, "--role=decode", "--name=other", env=env) as decode,
    ):
        with (
            flowkv("serve", "--port=0", "--grpc-port=0", *front_arguments, env=env) as first,
            Client(Front(first.process, first.lines).address) as client,
        ):
            wait_for(lambda: is_whole(client))
            assert client.generate(PROMPT, GREEDY)[0].outputs[0].token_ids == expected
            stream = client.generate(PROMPT, LONG, stream=True)
            next(stream)
            first.process.kill()  # in the middle of it
            with pytest.raises(FlowKVError):
                list(stream)
        with serving(*front_arguments, env=env) as (_, client):
            wait_for(lambda: is_whole(client), "both are there again, and hold nothing")
            nodes = client.cluster.snapshot().nodes
            assert {(node.name, node.role, node.epoch) for node in nodes} == {
                ("prefill-0", Role.PREFILL, 2),
                ("other", Role.DECODE, 2),
            }
            assert client.generate(PROMPT, GREEDY)[0].outputs[0].token_ids == expected
            assert client.cluster.records(1)[0].handoff is not None
            prefill.process.terminate()
            assert prefill.wait() == 0
            wait_for(lambda: len(client.cluster.snapshot().nodes) == 1)
            assert client.generate(PROMPT, GREEDY)[0].outputs[0].token_ids == expected
        decode.process.terminate()
        assert decode.wait() == 0
        assert "left: " in decode.lines[-1]


def test_nothing_stays_when_the_front_is_killed(
    model: str, env: dict[str, str], expected: list[int]
) -> None:
    with flowkv(
        "serve", "--port=0", "--grpc-port=0", "--workers=spawn", f"--model={model}", *SIZES, env=env
    ) as run:
        front = Front(run.process, run.lines)
        with Client(front.address) as client:
            assert client.generate(PROMPT, GREEDY)[0].outputs[0].token_ids == expected
        workers = front.workers()
        assert ["--name=hybrid-0" in worker.cmdline() for worker in workers] == [True]
        assert SECRET.decode() not in " ".join(workers[0].cmdline())
        front.process.kill()
        _, alive = psutil.wait_procs(workers, timeout=30)
        assert not alive


def test_a_worker_with_another_secret(model: str, env: dict[str, str]) -> None:
    membership = Membership(("127.0.0.1", 0), b"another", RecordingListener(), version=VERSION)
    try:
        host, port = membership.address
        arguments = (f"--controller={host}:{port}", f"--model={model}", *SIZES)
        with flowkv("worker", *arguments, env=env) as worker:
            assert worker.wait() == 2
            assert "secret" in worker.said("error")[0] or "secret" in "".join(worker.lines)
    finally:
        membership.close()


def test_a_worker_that_cannot_start_ends_the_front(model: str, env: dict[str, str]) -> None:
    arguments = (
        "--port=0",
        "--grpc-port=0",
        "--workers=spawn",
        f"--model={model}",
        "--tensor-parallel-size=64",
    )
    with flowkv("serve", *arguments, env=env) as front:
        assert front.wait() == 1
        said = "\n".join(front.lines)
        assert "worker hybrid-0 did not start: exit status 2" in said
        assert "tensor_parallel_size=64 exceeds" in said


def test_a_front_without_secret_listens_on_loopback_only(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    arguments = ["serve", "--port=0", "--grpc-port=0", f"--model={model}", "--workers=spawn"]
    assert main([*arguments, "--cluster-host=0.0.0.0"]) == 2
    assert "without a secret" in capsys.readouterr().err


def test_the_front_never_imports_jax() -> None:
    modules = "flowkv_jax.commands.serve, flowkv_jax.commands.serve_cluster"
    code = f"import sys, {modules}; sys.exit(bool({{'jax', 'jaxlib', 'flax'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# What a worker is told


def parsed(flags: list[str]) -> ServeConfig:
    parser = argparse.ArgumentParser()
    add_config_arguments(parser, ServeConfig)
    return config_from_args(parser.parse_args(flags), ServeConfig)


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"max_num_seqs": 3, "enable_overlap": False, "debug": True, "model": "a b"},
        {"request_timeout_s": 2.5, "max_logprobs": -1, "compilation_cache_dir": ""},
        {"served_model_name": "x", "handoff_strategy": "block-major", "warmup": False},
        {"prefill_load_weights": (0.5, 0.5, 0, 0, 0, 0, 0, 0), "swap_space_bytes": 0},
    ],
)
def test_flags_say_what_the_configuration_says(overrides: dict[str, object]) -> None:
    config = load_config(ServeConfig, overrides=overrides)
    flags = flags_of(config)
    assert parsed(flags) == config
    assert len(flags) == sum(8 if isinstance(v, tuple) else 1 for v in overrides.values())


def test_a_worker_is_told_its_own_settings_only() -> None:
    overrides = {"prefill_nodes": 1, "decode_nodes": 1, "port": 1, "lease_s": 9, "max_num_seqs": 3}
    config = load_config(ServeConfig, overrides=overrides)
    commands = WorkerCommands(config, ("h", 5), b"hush", [Share((0,)), Share((1, 2))])
    first = commands.command(Role.PREFILL, "prefill-0")
    assert first.argv[4:] == [
        "--controller=h:5",
        "--role=prefill",
        "--name=prefill-0",
        "--max-num-seqs=3",
    ]
    assert first.environment[SECRET_VARIABLE] == "hush"
    assert (first.cpus, first.environment["OMP_NUM_THREADS"]) == ((0,), "1")
    assert commands.command(Role.DECODE, "decode-0").cpus == (1, 2)
    assert commands.command(Role.PREFILL, "prefill-0").cpus == (0,), "when it is started again"


def test_a_file_for_the_front_serves_workers_too(tmp_path: Path) -> None:
    file = tmp_path / "both.yaml"
    file.write_text("{prefill_nodes: 1, decode_nodes: 2, max_num_seqs: 3, port: 7, lease_s: 2}")
    parser = argparse.ArgumentParser()
    add_config_arguments(parser, ServeConfig, omit=OMIT)
    config = config_from_args(parser.parse_args(["--config", str(file)]), ServeConfig)
    assert config.engine.scheduler.max_num_seqs == 3
    with pytest.raises(SystemExit):
        parser.parse_args(["--decode-nodes=1"])


def shares(cpus: list[int], gpus: list[str], num_workers: int = 2, **overrides: object) -> object:
    config = load_config(ServeConfig, overrides=overrides)
    return machine_shares(config, num_workers, cpus=cpus, gpus=gpus)


def test_shares_of_a_machine() -> None:
    assert shares([0, 1], []) == [Share((0,)), Share((1,))]
    assert shares([0], []) == [Share(), Share()]
    assert shares([0, 1, 2, 3, 4], []) == [Share((0, 1)), Share((2, 3, 4))]
    assert shares([0, 1], [], worker_cpus="off") == [Share(), Share()]
    assert shares([0, 1, 2], [], worker_cpus="1-2") == [Share((1,)), Share((2,))]
    with pytest.raises(ConfigError, match=r"may not run on: \[5\]"):
        shares([0, 1], [], worker_cpus="0,5")
    assert shares([0], ["0", "1", "2"]) == [Share(gpus=("0",)), Share(gpus=("1",))]
    four = [Share(gpus=("0", "1")), Share(gpus=("2", "3"))]
    assert shares([0], ["0", "1", "2", "3"], tensor_parallel_size=2) == four
    with pytest.raises(ConfigError, match="take 4 GPUs; there are 3"):
        shares([0], ["0", "1", "2"], tensor_parallel_size=2)
    assert shares([0], ["7"]) == [Share(gpus=("7",), gpu_memory_share=0.45)] * 2


def test_gpus_that_are_seen() -> None:
    def nodes() -> list[Path]:
        return [Path("/dev/nvidia0"), Path("/dev/nvidia1")]

    assert visible_gpus({}, nodes) == ["0", "1"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3, 5"}, nodes) == ["3", "5"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, nodes) == []
    assert visible_gpus({"JAX_PLATFORMS": "cpu"}, nodes) == []
    assert visible_gpus({"JAX_PLATFORMS": "cuda,cpu"}, nodes) == ["0", "1"]


def test_secrets(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(" hush\n")
    assert read_secret(str(file), {SECRET_VARIABLE: "other"}) == b"hush"
    assert read_secret(None, {SECRET_VARIABLE: "other"}) == b"other"
    assert read_secret(None, {}) == b""
    file.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        read_secret(str(file), {})
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_secret(str(tmp_path / "nowhere"), {})


def test_cpu_lists() -> None:
    assert parse_cpus("0,2-4, 3") == [0, 2, 3, 4]
    for text in ("", "a", "4-2", "1,,2", "-1"):
        with pytest.raises(ConfigError, match="must be auto, off, or a list"):
            parse_cpus(text)
    with pytest.raises(ConfigError, match="worker_cpus='x'"):
        ClusterConfig(worker_cpus="x")
    with pytest.raises(ConfigError, match="at most a third of lease_s"):
        ClusterConfig(lease_s=1.0, heartbeat_s=0.5)


def test_addresses() -> None:
    assert parse_address("host:5") == ("host", 5)
    assert parse_address("[::1]:5") == ("::1", 5)
    for text in ("host", "host:", ":5", "host:0", "host:65536", "host:x"):
        with pytest.raises(argparse.ArgumentTypeError, match="must be HOST:PORT"):
            parse_address(text)


def test_help_names_what_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["worker", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "--controller HOST:PORT" in text and "--decode-nodes" not in text
    with pytest.raises(SystemExit):
        main(["worker"])
    assert "--controller" in capsys.readouterr().err


@pytest.mark.parametrize("file", sorted(Path(ROOT, "configs").glob("*.yaml")), ids=lambda f: f.stem)
def test_configurations_that_come_along(file: Path) -> None:
    if file.stem.startswith("links_"):  # a topology
        return
    config = load_config(ServeConfig, file)
    roles = [role.value[0] for role in config.engine.nodes.roles]
    if match := re.search(r"(\d)p(\d)d", file.stem):
        assert (roles.count("p"), roles.count("d")) == (int(match[1]), int(match[2]))
    assert config.has_workers is (len(roles) > 1)
