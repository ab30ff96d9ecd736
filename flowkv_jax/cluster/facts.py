"""What a worker says of itself when it joins, and which of it must be equal. Pure, no JAX.

Any sequence may move between any two nodes, so all of them must compute the same K/V and store
them in the same order. What only says how much a node can hold or do may differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated

import msgspec

from pallas_kernels.kv_layout import KVLayout

NODE_NAME_PATTERN = r"^[A-Za-z0-9._-]{0,64}\Z"
"""Names are shown in terminals and logs."""
NodeName = Annotated[str, msgspec.Meta(pattern=NODE_NAME_PATTERN)]
Name = Annotated[str, msgspec.Meta(max_length=128)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
HostPort = tuple[Annotated[str, msgspec.Meta(max_length=256)], Annotated[int, msgspec.Meta(ge=0)]]


class ModelFacts(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What must be equal on all nodes of a cluster.

    Attributes:
        architecture: of the model.
        config_digest: of its sizes and constants.
        weights_digest: of the files they come from; see `worker.fingerprint`.
        layout: of a block of the KV pool; holds dtype and block size.
    """

    architecture: Name
    config_digest: Name
    weights_digest: Name
    layout: KVLayout


class NodeFacts(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What may differ from node to node.

    Attributes:
        num_blocks: of its pool.
        max_num_seqs, max_num_batched_tokens: bounds of a step.
        max_request_tokens: prompt plus output that fit its pool and its context.
        tensor_parallel_size: devices of the replica.
        relative_speed: of its device, against the others'; 1 if not known.
        device_kind: such as "cpu" or "NVIDIA H100 80GB HBM3".
        host_id: see `transfer.host.host_id`.
        pid: of its process.
        transfer_address: where its transfer engine listens.
    """

    num_blocks: Count
    max_num_seqs: Count
    max_num_batched_tokens: Count
    max_request_tokens: Count
    tensor_parallel_size: Count = 1
    relative_speed: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    device_kind: Name = ""
    host_id: Annotated[str, msgspec.Meta(max_length=512)] = ""
    pid: Count = 0
    transfer_address: HostPort | None = None


def differences(wanted: Mapping[str, object], worker: ModelFacts) -> list[str]:
    """Each fact that is not as wanted, for people; empty if all are.

    Args:
        wanted: some of `named_facts`, or all.
    """
    found = named_facts(worker)
    return [
        difference(name, wanted[name], found[name])
        for name in wanted
        if wanted[name] != found[name]
    ]


def difference(name: str, cluster: object, worker: object) -> str:
    """ "dtype float32 in the cluster, bfloat16 at the worker" """
    return f"{name} {cluster} in the cluster, {worker} at the worker"


def named_facts(facts: ModelFacts) -> dict[str, object]:
    """Facts by the names that people are shown."""
    named = {
        "architecture": facts.architecture,
        "model configuration": facts.config_digest,
        "weights": facts.weights_digest,
    }
    layout = {field.name: getattr(facts.layout, field.name) for field in _LAYOUT_FIELDS}
    return named | layout


# The size of an element follows from its type.
_LAYOUT_FIELDS = [f for f in dataclasses.fields(KVLayout) if f.name != "dtype_bytes"]
