"""Talk to a server started with `flowkv serve`.

python examples/grpc_client.py [HOST:PORT]
"""

import sys

from flowkv_jax import Client, SamplingParams


def main() -> None:
    address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
    params = SamplingParams(temperature=0.0, max_tokens=32)
    with Client(address) as client:
        for output in client.generate(["The capital of France is"], params):
            print(output.text)
        for output in client.generate("Once upon a time", params, stream=True):
            print(output.outputs[0].delta_text, end="", flush=True)
        print()


if __name__ == "__main__":
    main()
