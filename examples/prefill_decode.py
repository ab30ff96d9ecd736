"""Prefill on one node, decode on another, in one process; and what each hand-off moved.

python examples/prefill_decode.py [MODEL]
"""

import sys

from flowkv_jax import Engine, SamplingParams

PROMPTS = ["The capital of France is", "Once upon a time", "The sea is"]


def main(model: str = "smollm2-135m-instruct") -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24)
    with Engine(model, max_num_seqs=8, prefill_nodes=1, decode_nodes=1) as engine:
        engine.warmup()
        for output in engine.generate(PROMPTS, params):
            print(f"{output.prompt!r} {output.text!r}")
        for node in engine.cluster.snapshot().nodes:
            print(f"{node.name}: {node.role.value}, prefill load {node.prefill_load:.2f}")
        for record in engine.cluster.records(limit=len(PROMPTS)):
            moved = record.handoff
            if moved is not None:
                print(
                    f"{moved.src} -> {moved.dst}: {moved.num_blocks} blocks, {moved.runs} runs, "
                    f"{moved.calls} calls, {moved.data_bytes} bytes, {1e3 * moved.total_s:.2f} ms"
                )


if __name__ == "__main__":
    main(*sys.argv[1:])
