"""What administrators have nodes do: forgetting cached prompts, recording profiles."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from flowkv_jax.cluster import front
from flowkv_jax.cluster.errands import Errands
from flowkv_jax.cluster.front import ClusterEngine
from flowkv_jax.cluster.messages import (
    Errand,
    ErrandKind,
    ErrandResult,
    decode_at_front,
    decode_at_worker,
    encode,
)
from flowkv_jax.config import ServeConfig, load_config
from flowkv_jax.engine.profiler import Profiler
from flowkv_jax.errors import GenerationError, RetryableRequestError, UnprocessableError
from tests.cluster_fakes import wait_for
from tests.test_cluster_membership import Cluster, raw_member
from tests.test_control_plane import plane

RESET, START = ErrandKind.RESET_PREFIX_CACHE, ErrandKind.START_PROFILE


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with contextlib.closing(Cluster()) as made:
        yield made


def test_messages() -> None:
    errand = Errand(3, START, 2.5)
    assert decode_at_worker(encode(errand)) == errand
    result = ErrandResult(3, True, None)
    assert decode_at_front(encode(result)) == result


def test_results_come_back_whatever_their_order(cluster: Cluster) -> None:
    worker = cluster.worker()
    port = cluster.listener.port("hybrid-0")
    first, second, third = (Future[bool]() for _ in range(3))
    worker.node.errands = [first, second, third]
    asked = [port.run_errand(RESET), port.run_errand(START, 2.5), port.run_errand(RESET)]
    wait_for(lambda: not worker.node.errands)
    assert worker.node.calls[-3:] == [
        ("errand", (RESET, 0.0)),
        ("errand", (START, 2.5)),
        ("errand", (RESET, 0.0)),
    ]
    third.set_result(False)
    assert asked[2].result(60) is False
    second.set_exception(UnprocessableError("nowhere to write it"))
    with pytest.raises(UnprocessableError, match="nowhere"):
        asked[1].result(60)
    first.set_exception(KeyError("a bug"))
    with pytest.raises(GenerationError, match="KeyError"):
        asked[0].result(60)


def test_a_node_that_is_lost_answers_nothing(cluster: Cluster) -> None:
    with raw_member(cluster) as link:
        port = cluster.listener.port("raw")
        asked = port.run_errand(RESET)
        assert isinstance(link.receive(), Errand)
        assert not asked.done()
    with pytest.raises(RetryableRequestError, match="raw"):
        asked.result(60)
    with pytest.raises(RetryableRequestError):
        port.run_errand(RESET).result(0)


def test_answers_nobody_waits_for(cluster: Cluster) -> None:
    with raw_member(cluster) as link:
        port = cluster.listener.port("raw")
        link.send(ErrandResult(99, True, None))
        asked = port.run_errand(RESET)
        message = link.receive()
        assert isinstance(message, Errand)
        for result in (True, False):
            link.send(ErrandResult(message.number, result, None))
        assert asked.result(60) is True


def test_an_engine_over_workers_asks_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with plane(2) as made:
        model: Any = SimpleNamespace(served_model_name="fake")
        engine = ClusterEngine(load_config(ServeConfig), model, made.control, made.fleet)
        assert engine.reset_prefix_cache()
        engine.start_profile(1.0)
        engine.stop_profile()
        with raw_member(SimpleNamespace(front=made.control.membership)):
            wait_for(lambda: "raw" in made.epochs)
            monkeypatch.setattr(front, "_ERRAND_TIMEOUT_S", 0.1)
            with pytest.raises(RetryableRequestError, match="node "):
                engine.reset_prefix_cache()


def test_books() -> None:
    errands = Errands()
    number, future = errands.open()
    assert len(errands) == 1
    errands.end(number, True, None)
    errands.end(number, False, None)
    assert future.result(0) is True and len(errands) == 0


def test_a_profile_is_written(tmp_path: Path) -> None:
    profiler = Profiler(str(tmp_path))
    assert profiler.start("decode-0", 100.0).result(60)
    with pytest.raises(UnprocessableError, match="being recorded"):
        profiler.start("decode-0", 100.0).result(60)
    jax.block_until_ready(jnp.ones(3) + 1)
    assert profiler.stop().result(60)
    assert list((tmp_path / "decode-0").rglob("*.xplane.pb"))
    with pytest.raises(UnprocessableError, match="no profile"):
        profiler.stop().result(60)
    profiler.close()
    profiler.close()


def test_a_profile_ends_by_itself_and_with_the_process(tmp_path: Path) -> None:
    profiler = Profiler(str(tmp_path))
    profiler.start("short", 0.01).result(60)
    wait_for(lambda: list((tmp_path / "short").rglob("*.xplane.pb")))
    profiler.start("cut", 100.0).result(60)
    profiler.close()
    assert list((tmp_path / "cut").rglob("*.xplane.pb"))


def test_a_profile_needs_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for directory, why in [(None, "profile_dir"), (str(tmp_path / "file"), "no profile can be")]:
        profiler = Profiler(directory)
        with pytest.raises(UnprocessableError, match=why):
            profiler.start("node", 1.0).result(60)
        profiler.close()
