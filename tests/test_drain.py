"""A node that is drained hands on what it decodes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from flowkv_jax import Engine, SamplingParams

PARAMS = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)


def test_what_a_drained_node_decodes_goes_on_elsewhere(make_engine: Callable[..., Engine]) -> None:
    prompt = np.random.default_rng(0).integers(3, 512, 33).tolist()
    expected = make_engine().generate(prompt, PARAMS)[0].outputs[0].token_ids
    engine = make_engine(prefill_nodes=1, decode_nodes=2)
    stream = engine.generate(prompt, PARAMS, stream=True)
    tokens: list[int] = []
    for output in stream:
        tokens += output.outputs[0].delta_token_ids
        if len(tokens) == 40:
            break
    nodes = engine._cluster.nodes
    (holder,) = (name for name, node in nodes.items() if node.load.num_requests_running)
    engine.cluster.drain(holder)
    for output in stream:
        tokens += output.outputs[0].delta_token_ids
    assert tokens == expected
    (record,) = engine._cluster.dispatcher.finished_records()
    assert {holder, record.decode_node} == {"decode-0", "decode-1"}
    assert record.handoff is not None and record.handoff.src == holder
