"""Our Llama against Hugging Face transformers (float32); goldens/make_goldens.py made the data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flowkv_jax import Engine, SamplingParams
from flowkv_jax.config import DEFAULT_MODEL
from flowkv_jax.models.hub import resolve
from flowkv_jax.models.llama import Llama, StepInputs
from flowkv_jax.models.source import open_model
from flowkv_jax.models.weights import load_weights
from tests.tiny_models import TINY_VARIANTS, write_tiny_model

GOLDENS = Path(__file__).parent / "goldens"
TINY: dict[str, Any] = json.loads((GOLDENS / "tiny.json").read_text())
SMOLLM2: dict[str, Any] = json.loads((GOLDENS / "smollm2.json").read_text())


def all_logits(model_path: str, token_ids: list[int], rows: int) -> np.ndarray:
    """float32[tokens, V] of a prompt computed in one step of `rows` tiles over shuffled blocks."""
    with open_model(model_path) as source:
        abstract = nnx.eval_shape(lambda: Llama(source.config, jnp.float32))
        weights = load_weights(abstract, source.config, source)
        config = source.config
    model = nnx.merge(nnx.split(abstract)[0], weights)
    count = len(token_ids)
    tile = -(-count // rows)
    num_blocks = -(-count // 16) + 4
    table = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
    tokens = np.zeros(rows * tile, np.int32)
    tokens[:count] = token_ids
    starts = np.arange(rows, dtype=np.int32) * tile
    step = StepInputs(
        jnp.asarray(tokens.reshape(rows, tile)),
        jnp.asarray(starts),
        jnp.asarray(np.minimum(starts + tile, count)),
        jnp.asarray(np.tile(table, (rows, 1))),
    )
    shape = (num_blocks, config.num_layers, 2, 16, config.num_kv_heads, config.head_dim)
    _, hidden_XD = jax.jit(lambda pool: model.forward(pool, step))(jnp.zeros(shape, jnp.float32))
    return np.asarray(model.logits(hidden_XD[:count]))


@pytest.mark.parametrize("variant", list(TINY_VARIANTS))
@pytest.mark.parametrize("rows", [1, 7])
def test_tiny_logits(variant: str, rows: int, tmp_path: Path):
    golden = TINY[variant]
    folder = write_tiny_model(tmp_path / variant, variant)
    logits = all_logits(str(folder), golden["prompt_token_ids"], rows)
    expected = np.load(GOLDENS / "tiny.npz")[variant]
    np.testing.assert_allclose(logits[golden["positions"]], expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("variant", list(TINY_VARIANTS))
def test_tiny_greedy_tokens(variant: str, make_engine):
    golden = TINY[variant]
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    output = make_engine(variant).generate(golden["prompt_token_ids"], params)[0]
    assert output.outputs[0].token_ids == golden["greedy_token_ids"]


@pytest.fixture(scope="module")
def smollm2(xla_cache: Path):
    with Engine(
        DEFAULT_MODEL, max_num_seqs=8, max_model_len=1024, compilation_cache_dir=str(xla_cache)
    ) as engine:
        yield engine


def test_real_model_greedy_tokens(smollm2: Engine):
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    prompts = [golden["prompt_token_ids"] for golden in SMOLLM2.values()]
    outputs = smollm2.generate(prompts, params)
    for (name, golden), output in zip(SMOLLM2.items(), outputs, strict=True):
        assert output.outputs[0].token_ids == golden["greedy_token_ids"], name


def test_real_model_logits(smollm2: Engine):
    """Last-position logits, from the engine's own log-probabilities of the whole vocabulary."""
    expected = np.load(GOLDENS / "smollm2.npz")
    path = str(resolve(DEFAULT_MODEL))
    for name in ("chat_capital", "one_token"):
        logits = all_logits(path, SMOLLM2[name]["prompt_token_ids"], 1)[-1]
        np.testing.assert_allclose(logits, expected[name], atol=1e-3, rtol=0, err_msg=name)
