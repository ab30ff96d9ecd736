"""Move KV blocks from one pool to another in as few calls as they allow.

python examples/move_blocks.py              two engines in this process, through shared memory
python examples/move_blocks.py tcp          the same through TCP
"""

import sys

import numpy as np

from pallas_kernels.kv_layout import KVLayout
from transfer import TransferRequest, align
from transfer.engine import TransferEngine
from transfer.pool_access import NumpyPool
from transfer.types import Verification

LAYOUT = KVLayout(
    num_layers=30, block_size=16, num_kv_heads=3, head_dim=64, dtype="float32", dtype_bytes=4
)
NUM_BLOCKS = 128


def main() -> None:
    backend = sys.argv[1] if len(sys.argv) > 1 else None
    pools = [np.zeros(LAYOUT.pool_shape(NUM_BLOCKS), np.float32) for _ in range(2)]
    pools[0][:] = np.random.default_rng(0).standard_normal(pools[0].shape, np.float32)
    with TransferEngine() as prefill, TransferEngine() as decode:
        prefill.register_pool("prefill/kv", NumpyPool(LAYOUT, NUM_BLOCKS, pools[0]))
        decode.register_pool("decode/kv", NumpyPool(LAYOUT, NUM_BLOCKS, pools[1]))
        prefill.connect(decode.listen("127.0.0.1", 0))

        # Block i of the first list goes to block i of the second.
        source_ids, destination_ids = range(8, 40), [*range(64, 80), *range(100, 116)]
        runs = align(source_ids, destination_ids)
        request = TransferRequest(
            src="prefill/kv",
            dst="decode/kv",
            data_bytes=len(source_ids) * LAYOUT.bytes_per_block,
            block_bytes=LAYOUT.bytes_per_block,
            runs=tuple(runs),
            verification=Verification.CHECKSUM,
        )
        report = prefill.submit(request, backend=backend).wait(timeout_s=30)

    assert np.array_equal(pools[1][destination_ids], pools[0][source_ids])
    [(hops, used)] = report.routes
    print(
        f"{report.data_bytes:,} bytes of {len(source_ids)} blocks in {report.runs} runs: "
        f"{report.calls} calls by {used} over {' > '.join(hops)}, {1e3 * report.seconds:.2f} ms"
    )


if __name__ == "__main__":
    main()
