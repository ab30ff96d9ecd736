"""Stream one answer, then stop another early: leaving the loop frees its blocks.

python examples/streaming_chat.py
"""

from contextlib import closing

from flowkv_jax import Engine, SamplingParams

MAX_CHARACTERS = 80


def main() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=200)
    with Engine("smollm2-135m-instruct") as engine:
        question = [{"role": "user", "content": "What is the capital of France?"}]
        for output in engine.chat(question, params, stream=True):
            print(output.outputs[0].delta_text, end="", flush=True)
        print()

        request = [{"role": "user", "content": "Tell me a long story."}]
        with closing(engine.chat(request, params, stream=True)) as stream:
            for output in stream:
                if len(output.text) > MAX_CHARACTERS:
                    break
        print(output.text, "...")


if __name__ == "__main__":
    main()
