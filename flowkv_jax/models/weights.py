"""From checkpoint tensors (Hugging Face names and orientation) to the model's weights on devices.

Tensors are read one at a time through the source's memory map, rearranged once into the order the
layers want, put on the device, and released, so the process never holds two copies of the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flowkv_jax.models.config import LlamaConfig
from flowkv_jax.models.llama import Llama

TENSOR_AXIS = "tensor"

# Which axis of a weight the tensor-parallel mesh axis cuts; None for replicated weights.
_SHARDED_AXIS: dict[str, int | None] = {
    "weight_VD": 0,
    "qkv_DKJH": 1,
    "qkv_bias_KJH": 0,
    "out_KGHD": 0,
    "out_bias_D": None,
    "gate_up_D2F": 2,
    "gate_up_bias_2F": 1,
    "down_FD": 0,
    "down_bias_D": None,
    "scale_D": None,
}


class WeightReader(Protocol):
    """The part of `models.source.ModelSource` that loading needs."""

    def read(self, name: str) -> np.ndarray: ...

    def release(self, name: str) -> None: ...


def partition_spec(leaf: str) -> PartitionSpec:
    """How a weight of that name lies on the tensor-parallel mesh."""
    axis = _SHARDED_AXIS[leaf]
    return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, TENSOR_AXIS)


def leaf_name(path: tuple[object, ...]) -> str:
    """Attribute name of a weight from its path in the state, such as "qkv_DKJH"."""
    return str(path[-1])


def load_weights(
    model: Llama,
    config: LlamaConfig,
    source: WeightReader,
    *,
    mesh: Mesh | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> nnx.State:
    """Read every weight of an abstract model (`nnx.eval_shape`) onto the devices.

    Args:
        model: abstract; fixes shapes and dtype.
        config: of the checkpoint.
        source: where the tensors are.
        mesh: a mesh with axis `TENSOR_AXIS`; None for one device.
        progress: called with (weights done, weights in all).

    Returns:
        The state to merge with the model's graph.
    """
    state = nnx.state(model)
    flat = nnx.to_flat_state(state)

    def load(path: tuple[object, ...], wanted: jax.ShapeDtypeStruct) -> jax.Array:
        assembler = _Assembler(config, source)
        array = _aligned(assembler(path, wanted.shape), wanted.dtype)
        for name in assembler.names_read:
            source.release(name)
        if array.shape != wanted.shape:
            raise AssertionError(f"{path}: assembled {array.shape}, the layer has {wanted.shape}")
        if mesh is None:
            return jax.device_put(array)
        return jax.device_put(array, NamedSharding(mesh, partition_spec(leaf_name(path))))

    loaded = []
    with ThreadPoolExecutor(max_workers=2, thread_name_prefix="weights") as pool:
        futures = [(path, leaf, pool.submit(load, path, leaf.get_value())) for path, leaf in flat]
        for done, (path, leaf, future) in enumerate(futures, start=1):
            loaded.append((path, leaf.replace(future.result())))
            if progress is not None:
                progress(done, len(futures))
    return nnx.from_flat_state(loaded)


class _Assembler:
    """Builds one weight of the model from the tensors it is made of."""

    def __init__(self, config: LlamaConfig, source: WeightReader) -> None:
        self._config = config
        self._source = source
        self.names_read: list[str] = []

    def __call__(self, path: tuple[object, ...], shape: tuple[int, ...]) -> np.ndarray:
        match tuple(str(part) for part in path):
            case ("ends", "embedding", "weight_VD"):
                return self._read("model.embed_tokens.weight")
            case ("ends", "head", "weight_VD"):
                return self._read("lm_head.weight")
            case ("ends", "final_norm", "scale_D"):
                return self._read("model.norm.weight")
            case ("layers", index, *rest):
                return self._layer(f"model.layers.{index}", rest, shape)
        raise AssertionError(f"no rule for weight {path}")

    def _layer(self, prefix: str, rest: list[str], shape: tuple[int, ...]) -> np.ndarray:
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        match rest:
            case ["attention_norm", "scale_D"]:
                return self._read(f"{prefix}.input_layernorm.weight")
            case ["mlp_norm", "scale_D"]:
                return self._read(f"{prefix}.post_attention_layernorm.weight")
            case ["attention", "qkv_DKJH"]:
                return self._qkv(attention, "weight")
            case ["attention", "qkv_bias_KJH"]:
                return self._qkv(attention, "bias")
            case ["attention", "out_KGHD"]:
                return self._read(f"{attention}.o_proj.weight").T.reshape(shape)
            case ["attention", "out_bias_D"]:
                return self._read(f"{attention}.o_proj.bias")
            case ["mlp", "gate_up_D2F"]:
                return np.stack(
                    [self._read(f"{mlp}.{name}_proj.weight").T for name in ("gate", "up")], axis=1
                )
            case ["mlp", "gate_up_bias_2F"]:
                return np.stack([self._read(f"{mlp}.{name}_proj.bias") for name in ("gate", "up")])
            case ["mlp", "down_FD"]:
                return self._read(f"{mlp}.down_proj.weight").T
            case ["mlp", "down_bias_D"]:
                return self._read(f"{mlp}.down_proj.bias")
        raise AssertionError(f"no rule for weight {prefix} {rest}")

    def _qkv(self, attention: str, kind: str) -> np.ndarray:
        """[D, K, G+2, H] for weights, [K, G+2, H] for biases."""
        config = self._config
        parts = []
        for name, heads in (
            ("q", config.num_heads // config.num_kv_heads),
            ("k", 1),
            ("v", 1),
        ):
            tensor = self._read(f"{attention}.{name}_proj.{kind}")
            tensor = tensor.T  # [D, heads * H]; a bias stays as it is
            parts.append(
                tensor.reshape(*tensor.shape[:-1], config.num_kv_heads, heads, config.head_dim)
            )
        return np.concatenate(parts, axis=-2)

    def _read(self, name: str) -> np.ndarray:
        self.names_read.append(name)
        return self._source.read(name)


def _aligned(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A contiguous copy at an address XLA can use in place, so that no further copy is made."""
    alignment = 64
    raw = np.empty(array.size * np.dtype(dtype).itemsize + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    copy = raw[start : start + array.size * np.dtype(dtype).itemsize].view(dtype)
    copy = copy.reshape(array.shape)
    np.copyto(copy, array, casting="unsafe")
    return copy
