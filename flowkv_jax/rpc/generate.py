"""Make the stubs beside the protos: `python -m flowkv_jax.rpc.generate`.

Generated code refuses a runtime older than its compiler, so the stubs in the repository come from
the oldest grpcio-tools that the package's requirements allow. A newer compiler would raise the
floor of every installation without a word; it is refused here.

The protos are compiled as `flowkv/v1/NAME.proto` and `inference/kserve.proto`: those are the names
they have in a process-wide pool of descriptors, where two files of one name cannot live together,
nor two of one package that say the same: a process that has our `inference` stubs can have neither
tritonclient's nor kserve's.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

COMPILER_VERSION = "1.81.1"
PROTO_ROOT = Path(__file__).parent
PROTOS = ("flowkv/v1/flowkv.proto", "flowkv/v1/cluster.proto", "inference/kserve.proto")

# The plugins write imports as if the proto root were on the path; it is a package of ours.
_PLUGIN_IMPORT = re.compile(r"^from (flowkv\.v1|inference) import", re.MULTILINE)
_PACKAGE_IMPORT = r"from flowkv_jax.rpc.\1 import"


def generate(destination: Path) -> list[Path]:
    """Compile the protos into `destination`, which plays the part of `PROTO_ROOT`.

    Returns:
        The files written.

    Raises:
        subprocess.CalledProcessError: the compiler refused; its message is on stderr.
    """
    destination.mkdir(parents=True, exist_ok=True)
    outputs = [f"--{kind}_out={destination}" for kind in ("python", "pyi", "grpc_python")]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO_ROOT}", *outputs, *PROTOS]
    subprocess.run(command, check=True)
    written = []
    for proto in PROTOS:
        stem = destination / proto.removesuffix(".proto")
        written += sorted(stem.parent.glob(f"{stem.name}_pb2*.py*"))
    for stub in written:
        source = stub.read_text(encoding="utf-8")
        stub.write_text(_PLUGIN_IMPORT.sub(_PACKAGE_IMPORT, source), encoding="utf-8")
    return written


def main() -> int:
    installed = importlib.metadata.version("grpcio-tools")
    if installed != COMPILER_VERSION:
        print(
            f"grpcio-tools {installed} is installed; the stubs are made with {COMPILER_VERSION}, "
            f"the oldest that is supported: pip install grpcio-tools=={COMPILER_VERSION} in an "
            "environment of its own and run this file there",
            file=sys.stderr,
        )
        return 1
    for path in generate(PROTO_ROOT):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
