"""`flowkv bench transfer`: flags, and where the report goes."""

from __future__ import annotations

import argparse
import enum
import json
import platform
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

from flowkv_jax.commands import Context
from flowkv_jax.errors import ValidationError

if TYPE_CHECKING:
    from flowkv_jax.bench.transfer import TransferBench
    from flowkv_jax.bench.transfer_report import Report

T = TypeVar("T")

_FULL: dict[str, Any] = {
    "tokens": "500,1000,4000,8000,10000,12000",
    "num_layers": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "block_size": 16,
    "repeat": 5,
    "small_repeat": 20,
    "operations": 10_000,
    "samples": 500,
}
_QUICK: dict[str, Any] = _FULL | {
    "backends": "shared_memory,tcp",
    "tokens": "64,256",
    "num_layers": 2,
    "num_kv_heads": 2,
    "head_dim": 16,
    "repeat": 2,
    "small_repeat": 2,
    "operations": 500,
    "samples": 20,
}
_HELP = {
    "num_layers": "layers",
    "num_kv_heads": "KV heads",
    "head_dim": "width of a head; elements have 2 bytes",
    "block_size": "tokens in a block",
    "repeat": "repetitions; medians are reported",
    "small_repeat": "repetitions of small transfers, at most",
    "operations": "random operations on each allocator before blocks of churned pools move",
    "samples": "requests of each length whose runs are counted",
}


def configure(parser: argparse.ArgumentParser) -> None:
    _add_what_moves(parser)
    _add_how(parser)
    add = parser.add_argument
    add("--json", action="store_true", help="print the report as JSON")
    add("--markdown", action="store_true", help="print the tables as Markdown")
    add("--output", "-o", metavar="FILE", help="write the JSON report there too")
    add("--plot", metavar="FILE", help="draw a PNG picture there; needs the extra `plots`")
    parser.set_defaults(run=run_transfer)


def _add_what_moves(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--backends",
        metavar="NAMES",
        help="which, with commas (default: all that work here); shared_memory, tcp, storage, "
        "jax_pull, collective, nixl",
    )
    add(
        "--strategies",
        default="layer-major,block-major,aligned-runs",
        metavar="NAMES",
        help="which, with commas (default: %(default)s)",
    )
    add(
        "--placements",
        default="fresh,churned",
        metavar="NAMES",
        help="of blocks in the pools (default: %(default)s)",
    )
    add(
        "--tokens",
        metavar="LIST",
        help=f"input lengths, with commas (default: {_FULL['tokens']}); 12000 tokens of the "
        "default model are 1.5 GiB, of which about five are held at once",
    )
    add(
        "--churned-tokens",
        metavar="LIST",
        help="those of them that move in churned pools, too (default: the longest; the runs of all "
        "are counted); or all",
    )
    for name, text in _HELP.items():
        add(
            f"--{name.replace('_', '-')}",
            type=int,
            metavar="N",
            help=f"{text} (default: {_FULL[name]})",
        )


def _add_how(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--cell-seconds",
        type=float,
        default=1.0,
        metavar="X",
        help="layer-major and block-major transfers are not repeated after so long "
        "(default: %(default)s)",
    )
    add(
        "--occupancy",
        type=float,
        default=0.8,
        metavar="X",
        help="share of churned pools in use, in (0, 1) (default: %(default)s)",
    )
    add(
        "--pool-blocks",
        type=int,
        metavar="N",
        help="of each pool (default: as few as hold the longest input at that occupancy)",
    )
    add("--no-small", action="store_true", help="leave out fixed costs, on blocks of 16 KiB")
    add(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=PYTHON",
        help="measure nixl or mooncake beside on small transfers, with the interpreter of an "
        "environment that has it; may be repeated",
    )
    add(
        "--warm-caches",
        action="store_true",
        help="do not empty the caches before every copy and transfer",
    )
    add("--checksum", action="store_true", help="let the engine verify every transfer")
    add("--storage-dir", metavar="DIR", help="where the storage backend's files go for the while")
    add("--seed", type=int, default=0, metavar="N", help="of contents and churn (default: 0)")
    add("--quick", action="store_true", help="a tiny model and few repetitions: does it work?")


def run_transfer(args: argparse.Namespace, context: Context) -> int:
    """Exit status 1 where a backend failed, with everything else in the report."""
    from flowkv_jax import environment
    from flowkv_jax.bench.plots import check_plotting, plot_transfer
    from flowkv_jax.bench.transfer import run_transfer_benchmark

    if args.plot:
        check_plotting()
    for name in ("output", "plot"):
        folder = Path(getattr(args, name) or "").parent
        if not folder.is_dir():
            raise ValidationError(f"--{name}: there is no folder {folder}", parameter=name)
    load_before = environment.host_facts()["load_average"]
    begin = perf_counter()

    def progress(line: str) -> None:
        print(f"[{perf_counter() - begin:5.1f} s] {line}", file=context.stderr, flush=True)

    try:
        bench = _bench(args)
        report = run_transfer_benchmark(bench, progress)
    except ValidationError:
        raise
    except ValueError as error:
        raise ValidationError(str(error)) from error
    document = {
        "benchmark": "transfer",
        "commit": environment.source_commit(),
        "versions": environment.versions(),
        "host": environment.host_facts() | _memory_facts() | {"load_average_before": load_before},
        "seconds": perf_counter() - begin,
        "settings": bench.document(),
        **report.document(),
    }
    if args.output:
        Path(args.output).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if args.plot and report.large:
        plot_transfer(report.large, Path(args.plot))
    if args.json:
        print(json.dumps(document, indent=2), file=context.stdout)
    else:
        _print(bench, report, document, context, as_markdown=args.markdown)
    return 1 if report.failed else 0


def _bench(args: argparse.Namespace) -> TransferBench:
    from flowkv_jax.bench.transfer import TransferBench
    from flowkv_jax.bench.transfer_cases import SMALL_CASES
    from flowkv_jax.bench.transfer_systems import System
    from pallas_kernels.kv_layout import KVLayout
    from transfer.strategies import Strategy

    defaults = _QUICK if args.quick else _FULL

    def setting(name: str) -> Any:
        given = getattr(args, name)
        return defaults.get(name) if given is None else given

    layout = KVLayout(
        num_layers=setting("num_layers"),
        block_size=setting("block_size"),
        num_kv_heads=setting("num_kv_heads"),
        head_dim=setting("head_dim"),
        dtype="bfloat16",
        dtype_bytes=2,
    )
    numbers = ("repeat", "small_repeat", "operations", "samples")
    tokens = _listed("tokens", setting("tokens"), int)
    churned = args.churned_tokens
    return TransferBench(
        layout=layout,
        tokens=tokens,
        churned_tokens=tokens
        if churned == "all"
        else _listed("churned-tokens", churned or "", int) or None,
        backends=_listed("backends", setting("backends") or "", str),
        strategies=_listed("strategies", args.strategies, Strategy),
        placements=_listed("placements", args.placements, str),
        **{name: setting(name) for name in numbers},
        cell_s=args.cell_seconds,
        occupancy=args.occupancy,
        pool_blocks=args.pool_blocks,
        small=() if args.no_small else SMALL_CASES[:2] if args.quick else SMALL_CASES,
        systems=tuple(System.parse(text) for text in args.peer),
        cold=not args.warm_caches,
        checksum=args.checksum,
        storage_dir=Path(args.storage_dir) if args.storage_dir else None,
        seed=args.seed,
    )


def _listed(flag: str, text: str, kind: Callable[[str], T]) -> tuple[T, ...]:
    """Values between commas, each once.

    Raises:
        ValidationError: one of them is none of that kind.
    """
    found: dict[T, None] = {}
    for name in filter(None, map(str.strip, text.split(","))):
        try:
            found[kind(name)] = None
        except ValueError:
            expected = "a whole number"
            if isinstance(kind, type) and issubclass(kind, enum.Enum):
                expected = f"one of {', '.join(member.value for member in kind)}"
            raise ValidationError(
                f"--{flag}: {name!r} is not {expected}", parameter=flag, value=name
            ) from None
    return tuple(found)


def _print(
    bench: TransferBench,
    report: Report,
    document: dict[str, Any],
    context: Context,
    *,
    as_markdown: bool,
) -> None:
    from flowkv_jax.bench.transfer_report import markdown

    tables, notes = report.tables(), _notes(bench, report, document)
    if as_markdown:
        print(markdown(tables, notes), file=context.stdout, end="")
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(file=context.stdout, width=None if context.stdout.isatty() else 200)
    for table in tables:
        shown = Table(title=table.title, title_justify="left", box=box.SIMPLE_HEAD)
        for index, heading in enumerate(table.headings):
            shown.add_column(heading, justify="left" if index == 0 else "right")
        for row in table.rows:
            shown.add_row(*row)
        console.print(shown)
    for note in notes:
        console.print(note, soft_wrap=True, highlight=False, markup=False)


def _memory_facts() -> dict[str, str]:
    """What decides how fast memory is copied, as Linux tells it."""
    facts = {"processor": platform.processor() or platform.machine(), "huge_pages": "unknown"}
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("ascii", "replace").splitlines():
            if line.startswith("model name"):
                facts["processor"] = line.partition(":")[2].strip()
                break
    with suppress(OSError):
        modes = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text("ascii")
        facts["huge_pages"] = modes.partition("[")[2].partition("]")[0]
    return facts


def _notes(bench: TransferBench, report: Report, document: dict[str, Any]) -> list[str]:
    """What a reader of the figures must know."""
    layout, host, versions = bench.layout, document["host"], document["versions"]
    load = host["load_average_before"][0], host["load_average"][0]
    notes = [
        f"{layout.num_layers} layers, {layout.num_kv_heads} KV heads of {layout.head_dim}, blocks "
        f"of {layout.block_size} tokens, bfloat16: {layout.bytes_per_token:,} bytes a token. "
        "Pools in host memory, two processes, one host.",
        f"Medians of {bench.repeat} from submission to acknowledgement; once layer-major or "
        f"block-major transfers had taken {bench.cell_s:g} s they were not repeated. Checksums "
        f"{'on' if bench.checksum else 'off'}, caches {'cold' if bench.cold else 'warm'}.",
        "Plain copy: np.copyto of the same runs in one process, one thread, in the same rounds.",
        f"{host['processor']}, {host['cores']} cores, huge pages: {host['huge_pages']}, load "
        f"average {load[0]:.1f} before and {load[1]:.1f} after.",
        f"Python {versions['python']}, jax {versions['jax']}, numpy "
        f"{versions['numpy']}, commit {document['commit']}, seed {bench.seed}.",
    ]
    systems = [f"{name}: {version}" for name, version in report.versions.items()]
    if systems:
        notes.append(f"Beside ours, between two measurements of it: {', '.join(systems)}.")
    notes += [f"{name} is not available: {why}" for name, why in report.unavailable.items()]
    notes += [f"{name} failed: {why}" for name, why in report.failed.items()]
    return notes
