"""What Pallas' Triton backend makes of a function for CUDA, on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax._src.lib.mlir import ir
from jax._src.lib.triton import dialect

_DEVICE = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")
TARGETS = ("__gpu$xla.gpu.triton", "triton_kernel_call")


def _for_a_gpu() -> AbstractContextManager[Any]:
    """What newer versions of JAX want to know before they lower a kernel."""
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=_DEVICE)
    return jax.sharding.use_abstract_mesh(mesh)


def export_for_cuda(function: Callable[..., Any], *shapes: Any) -> jax.export.Exported:
    """`function` as it would be saved for a GPU."""
    checks = [jax.export.DisabledSafetyCheck.custom_call(target) for target in TARGETS]
    with _for_a_gpu():
        export = jax.export.export(jax.jit(function), platforms=["cuda"], disabled_checks=checks)
        return export(*shapes)


def triton_modules(function: Callable[..., Any], *shapes: Any) -> list[str]:
    """The Triton IR of each kernel in `function`, as text."""
    with _for_a_gpu():
        lowered = jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",))
    texts = []
    for operation in _operations(lowered.compiler_ir("stablehlo").operation):
        if "mhlo.backend_config" in operation.attributes:
            config = ir.DictAttr(operation.attributes["mhlo.backend_config"])
            code = ir.StringAttr(config["ir"]).value_bytes
            with ir.Context() as context, ir.Location.unknown():
                dialect.register_dialect(context)
                texts.append(str(ir.Module.parse(code)))
    return texts


def _operations(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation
                yield from _operations(inner.operation)
