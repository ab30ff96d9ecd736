"""A decode node on another host than its front: joins by address and secret, serves, comes back.

Between network namespaces; a machine that makes none runs it between loopback addresses.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.namespaces import NamespacesUnavailable
from flowkv_jax import Engine, SamplingParams
from flowkv_jax.cluster.secret import SECRET_VARIABLE
from tests.cluster_fakes import wait_for
from tests.cluster_serve import ROOT, Front, environment, flowkv
from tests.two_hosts import NamespaceNetwork, TwoHosts, loopback_network, namespace_network

SIZES = ("--max-num-seqs=4", "--max-model-len=1024", "--num-blocks=128", "--debug", "--no-warmup")
NUM_PROMPT, NUM_TOKENS = 70, 12


@pytest.fixture
def two_hosts() -> Iterator[TwoHosts]:
    with contextlib.ExitStack() as stack:
        try:
            network: TwoHosts = stack.enter_context(namespace_network())
        except NamespacesUnavailable:
            network = stack.enter_context(loopback_network())
        yield network


def test_a_decode_node_on_another_host(
    two_hosts: TwoHosts, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model = f"--model={tiny_model('gqa_tied')}"
    env = environment(tmp_path, **{SECRET_VARIABLE: "between hosts"})
    here, there = two_hosts.destination_command, two_hosts.source_command
    nodes = ("--workers=join", "--prefill-nodes=1", "--decode-nodes=1", "--lease-s=1.5")
    serve = (
        "serve",
        "--port=0",
        "--grpc-port=0",
        f"--cluster-host={two_hosts.listen_on}",
        model,
        *nodes,
        *SIZES,
    )
    with flowkv(*serve, env=env, command=here) as process:
        port = int(process.said(r"workers join at \S+:(\d+); waiting for 2")[1])
        local = f"--controller={'127.0.0.1' if not here else two_hosts.listen_on}:{port}"
        remote = "--controller={}:{}".format(*two_hosts.reach(port))
        with (
            flowkv("worker", local, "--role=prefill", model, *SIZES, env=env, command=here),
            flowkv("worker", remote, "--role=decode", model, *SIZES, env=env, command=there),
        ):
            address = Front(process.process, process.lines).address

            def ask() -> dict[str, object]:
                command = [*here, sys.executable, "-m", "tests.ask_server", address]
                command += [str(NUM_PROMPT), str(NUM_TOKENS)]
                done = subprocess.run(
                    command, cwd=ROOT, env=env, stdout=subprocess.PIPE, check=True
                )
                answer: dict[str, object] = json.loads(done.stdout)
                return answer

            first = ask()
            two_hosts.cut()
            process.said("decode-0 .* is gone: silent for")
            alone = ask()
            two_hosts.mend()
            process.said(r"decode-0 \(epoch 2\) has joined")
            # Its role may have been lent to the other one meanwhile.
            again = wait_for(lambda: answer if (answer := ask())["backend"] else None)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with Engine(model.partition("=")[2], max_num_seqs=4, max_model_len=1024) as engine:
        prompt = {"prompt_token_ids": list(range(7, 7 + NUM_PROMPT))}
        expected = engine.generate(prompt, params)[0].outputs[0].token_ids
    assert first["token_ids"] == alone["token_ids"] == again["token_ids"] == expected
    backend = "tcp" if isinstance(two_hosts, NamespaceNetwork) else first["backend"]
    assert first["backend"] == again["backend"] == backend is not None
    assert alone["backend"] is None
