"""Our Llama against Hugging Face transformers (float32); goldens/make_goldens.py made the data."""

from __future__ import annotations

import json
from collections.abc import Sequence
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

BLOCK_SIZE = 16
GOLDENS = Path(__file__).parent / "goldens"
TINY: dict[str, Any] = json.loads((GOLDENS / "tiny.json").read_text())
SMOLLM2: dict[str, Any] = json.loads((GOLDENS / "smollm2.json").read_text())


def prompt_logits(
    model_path: str, prompts: Sequence[list[int]], positions: Sequence[list[int]], tile: int
) -> list[np.ndarray]:
    """float32[positions, V] of each prompt; all prompts in one step of tiles, over shuffled blocks.

    Args:
        positions: for each prompt, where in it to look.
        tile: query tokens a row; a prompt takes as many rows as it needs.
    """
    with open_model(model_path) as source:
        config = source.config
        abstract = nnx.eval_shape(lambda: Llama(config, jnp.float32))
        graph, weights = nnx.split(abstract)[0], load_weights(abstract, config, source)
    step, first_rows, num_blocks = step_of_tiles(prompts, tile)
    shape = (num_blocks, config.num_layers, 2, BLOCK_SIZE, config.num_kv_heads, config.head_dim)

    @jax.jit
    def logits_at(weights: nnx.State, pool: jax.Array, tokens_B: jax.Array) -> jax.Array:
        model = nnx.merge(graph, weights)
        _, hidden_XD = model.forward(pool, step)
        return model.ends.logits(hidden_XD[tokens_B])

    wanted = [
        row * tile + position
        for row, places in zip(first_rows, positions, strict=True)
        for position in places
    ]
    logits_BV = np.asarray(
        logits_at(weights, jnp.zeros(shape, jnp.float32), jnp.asarray(wanted, jnp.int32))
    )
    return np.split(logits_BV, np.cumsum([len(places) for places in positions])[:-1])


def step_of_tiles(prompts: Sequence[list[int]], tile: int) -> tuple[StepInputs, list[int], int]:
    """A step that computes the prompts, the first row of each, and the number of blocks."""
    widths = [-(-len(prompt) // BLOCK_SIZE) for prompt in prompts]
    num_blocks = sum(widths) + 4
    shuffled = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
    rows: list[tuple[np.ndarray, int, int, np.ndarray]] = []
    first_rows = []
    for prompt, width, end in zip(prompts, widths, np.cumsum(widths), strict=True):
        first_rows.append(len(rows))
        table_M = np.resize(shuffled[end - width : end], max(widths))
        for start in range(0, len(prompt), tile):
            tokens_T = np.zeros(tile, np.int32)
            piece = prompt[start : start + tile]
            tokens_T[: len(piece)] = piece
            rows.append((tokens_T, start, start + len(piece), table_M))
    tokens_RT, starts_R, lens_R, tables_RM = (
        jnp.asarray(np.array(column, np.int32)) for column in zip(*rows, strict=True)
    )
    return StepInputs(tokens_RT, starts_R, lens_R, tables_RM), first_rows, num_blocks


@pytest.mark.parametrize("variant", list(TINY_VARIANTS))
@pytest.mark.parametrize("tile", [15, 100])
def test_tiny_logits(variant: str, tile: int, tmp_path: Path):
    golden = TINY[variant]
    folder = write_tiny_model(tmp_path / variant, variant)
    prompts, positions = [golden["prompt_token_ids"]], [golden["positions"]]
    (logits,) = prompt_logits(str(folder), prompts, positions, tile)
    expected = np.load(GOLDENS / "tiny.npz")[variant]
    np.testing.assert_allclose(logits, expected, atol=1e-3, rtol=0)


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


def test_real_model_logits():
    """Of the last position of every prompt."""
    expected = np.load(GOLDENS / "smollm2.npz")
    prompts = [golden["prompt_token_ids"] for golden in SMOLLM2.values()]
    positions = [[len(prompt) - 1] for prompt in prompts]
    found = prompt_logits(str(resolve(DEFAULT_MODEL)), prompts, positions, tile=64)
    for name, (logits,) in zip(SMOLLM2, found, strict=True):
        np.testing.assert_allclose(logits, expected[name], atol=1e-3, rtol=0, err_msg=name)
