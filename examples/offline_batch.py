"""Answer several prompts in one batch, each with its own sampling parameters.

python examples/offline_batch.py
"""

from flowkv_jax import Engine, SamplingParams

PROMPTS = [
    "The capital of France is",
    "Once upon a time there was",
    "The first ten prime numbers are",
]


def main() -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=24)
    creative = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=24)
    with Engine("smollm2-135m-instruct") as engine:
        for output in engine.generate(PROMPTS, [greedy, creative, greedy]):
            print(repr(output.prompt), "->", repr(output.text))


if __name__ == "__main__":
    main()
