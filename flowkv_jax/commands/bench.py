"""`flowkv bench`: the measurements that belong to the product."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from flowkv_jax.commands import Context, bench_serve, bench_transfer
from flowkv_jax.commands.options import add_config_arguments, config_from_args
from flowkv_jax.config import EngineConfig
from flowkv_jax.errors import ValidationError

if TYPE_CHECKING:
    from flowkv_jax.bench.engine import CellResult, PeerResult

DEFAULT_CELLS = "single,b8,b32,long_b4"
DEFAULT_SEED = 1234
_CLUSTER_SIZES = (1, 10, 100, 1000)


def configure(parser: argparse.ArgumentParser) -> None:
    targets = parser.add_subparsers(
        dest="benchmark",
        required=True,
        metavar="{engine,step,structured,layouts,allocator,selector,router,transfer,serve,"
        "serve-compare}",
    )
    _add_parts(targets)
    _add_between_processes(targets)


def _add_parts(targets: Any) -> None:
    _configure_engine(
        targets.add_parser(
            "engine",
            help="prefill and decode speed, beside other systems' logs",
            description="Measure prefill and decode speed. Prefix caching is off.",
            usage="flowkv bench engine [options]",
            allow_abbrev=False,
        )
    )
    _configure_step(
        targets.add_parser(
            "step",
            help="where the device's time in a step goes",
            description="Time the parts of a step by leaving them out.",
            usage="flowkv bench step [options]",
            allow_abbrev=False,
        )
    )
    _configure_structured(
        targets.add_parser(
            "structured",
            help="what a JSON schema costs decode",
            description="Measure decode with and without a form that answers must have, in turns.",
            usage="flowkv bench structured [options]",
            allow_abbrev=False,
        )
    )
    _configure_layouts(
        targets.add_parser(
            "layouts",
            help="block-major against layer-major decode attention",
            description="Time the same attention over both orders of the pool's axes.",
            allow_abbrev=False,
        )
    )
    _configure_allocator(
        targets.add_parser(
            "allocator",
            help="time of allocating and freeing KV blocks",
            description="Measure the KV block allocator.",
            allow_abbrev=False,
        )
    )
    _configure_selector(
        targets.add_parser(
            "selector",
            help="time of choosing a transfer path",
            description="Measure the path selector on a mock host.",
            allow_abbrev=False,
        )
    )
    _configure_router(
        targets.add_parser(
            "router",
            help="time of the controller's routing decision",
            description="Measure the controller on clusters of 1 to 1,000 nodes that do not exist.",
            allow_abbrev=False,
        )
    )


def _add_between_processes(targets: Any) -> None:
    bench_transfer.configure(
        targets.add_parser(
            "transfer",
            help="moving KV blocks between two processes",
            description="Move KV blocks between two processes by each backend and strategy.",
            usage="flowkv bench transfer [options]",
            allow_abbrev=False,
        )
    )
    bench_serve.configure(
        targets.add_parser(
            "serve",
            help="latency and throughput of a running server under load",
            description="Send requests to a running server at times drawn beforehand, whatever "
            "became of those before, and report what its clients see.",
            usage="flowkv bench serve [--target HOST:PORT] [options]",
            allow_abbrev=False,
        )
    )
    bench_serve.configure_compare(
        targets.add_parser(
            "serve-compare",
            help="reports of `bench serve` side by side",
            description="Show JSON reports of `flowkv bench serve` side by side, with ratios to "
            "the first.",
            usage="flowkv bench serve-compare FILE FILE... [options]",
            allow_abbrev=False,
        )
    )


def run(args: argparse.Namespace, context: Context) -> int:
    command: Callable[[argparse.Namespace, Context], int] = args.run
    return command(args, context)


def _configure_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cells",
        default=DEFAULT_CELLS,
        metavar="NAMES",
        help="which cells, with commas (default: %(default)s); single, b8, b32: that many prompts "
        "of 128 tokens, 128 new ones; long_b4: 4 prompts of 1024, 32 new",
    )
    parser.add_argument(
        "--repeat", type=int, default=3, metavar="N", help="repetitions (default: %(default)s)"
    )
    parser.add_argument(
        "--prompt-seed",
        type=int,
        default=DEFAULT_SEED,
        metavar="N",
        help="seed of the random prompts (default: %(default)s)",
    )
    parser.add_argument(
        "--compare", metavar="FILE", help="log of other systems, JSON lines; shows ratios"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--output", "-o", metavar="FILE", help="write the JSON report there too")
    parser.set_defaults(run=_run_engine)
    add_config_arguments(parser, EngineConfig, omit={"enable_prefix_caching"})


def _run_engine(args: argparse.Namespace, context: Context) -> int:
    from flowkv_jax.bench.engine import (
        CELLS,
        benchmark_config,
        measure_cell,
        read_peers,
        report,
    )
    from flowkv_jax.commands.loading import open_engine
    from flowkv_jax.commands.progress import spinner

    names = _chosen_cells(args.cells, CELLS)
    if args.repeat < 1:
        raise ValidationError(
            f"repeat={args.repeat} must be at least 1", parameter="repeat", value=args.repeat
        )
    peers = read_peers(Path(args.compare), names) if args.compare else []
    config = benchmark_config(config_from_args(args, EngineConfig))
    results = []
    with open_engine(config, context, quiet=args.json) as engine:
        for name in names:
            with spinner(context.stderr, f"Measuring {name}", enabled=not args.json):
                results.append(
                    measure_cell(engine, CELLS[name], repeat=args.repeat, seed=args.prompt_seed)
                )
        document = report(config, engine, results, peers, seed=args.prompt_seed)
    if args.output:
        Path(args.output).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if args.json:
        print(json.dumps(document, indent=2), file=context.stdout)
    else:
        print_results(results, peers, document, context.stdout)
    return 0


def _chosen_cells(text: str, known: Any) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise ValidationError(
                f"unknown cell {name!r}; there are {', '.join(known)}",
                parameter="cells",
                value=name,
            )
    if not names:
        raise ValidationError("no cell was named", parameter="cells", value=text)
    return names


def print_results(
    results: Sequence[CellResult],
    peers: Sequence[PeerResult],
    document: dict[str, Any],
    stdout: TextIO,
) -> None:
    """One row a cell; a column a peer with its speed and, in brackets, ours over its."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    # A file is as wide as its longest line; rich would fold it at 80 columns.
    console = Console(file=stdout, width=None if stdout.isatty() else 200)
    labels = list(dict.fromkeys(peer.label for peer in peers))
    by_key = {(peer.label, peer.cell): peer for peer in peers}
    for phase in ("prefill", "decode"):
        table = Table(title=f"{phase}, tokens/s", title_justify="left", box=box.SIMPLE_HEAD)
        table.add_column("cell (prompt/new)")
        for heading in ("flowkv", *labels):
            table.add_column(heading, justify="right")
        for result in results:
            cell = result.cell
            ours = getattr(result, f"{phase}_tok_s")
            row = [f"{cell.name} ({cell.prompt_tokens}/{cell.new_tokens})", f"{ours:,.1f}"]
            for label in labels:
                peer = by_key.get((label, cell.name))
                theirs = getattr(peer, f"{phase}_tok_s") if peer else None
                row.append(f"{theirs:,.1f} ({ours / theirs:.2f}x)" if theirs else "-")
            table.add_row(*row)
        console.print(table)
    host = {r.cell.name: r.host_ms_per_step for r in results if r.host_ms_per_step is not None}
    if host:
        listed = ", ".join(f"{name} {value:.2f} ms" for name, value in host.items())
        console.print(f"host time per decode step: {listed}")
    versions, device = document["versions"], document["device"]
    console.print(
        f"model {document['model']['model']} ({document['model']['dtype']}), "
        f"{device['platform']} x{len(device['devices'])}, jax {versions['jax']}, "
        f"commit {document['commit']}, seed {document['seed']}, "
        f"load average {document['host']['load_average'][0]:.1f}",
        soft_wrap=True,
    )


def _configure_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shapes",
        default="8x1@1024,2x256@512",
        metavar="LIST",
        help="rows x queries @ context, with commas (default: %(default)s: a decode step of 8 "
        "requests with 1024 tokens, and a prompt's first 512 tokens as two tiles)",
    )
    _add_numbers(parser, {"repeat": (int, 9, "rounds; medians are reported")})
    parser.set_defaults(run=_run_step)
    add_config_arguments(parser, EngineConfig)


def _run_step(args: argparse.Namespace, context: Context) -> int:
    from flowkv_jax.bench.step import StepShape, run_step_benchmark

    def shape(text: str) -> StepShape:
        match = re.fullmatch(r"(\d+)x(\d+)@(\d+)", text.strip())
        if match is None:
            raise ValueError(f"{text!r} is not ROWSxQUERIES@CONTEXT, such as 8x1@1024")
        return StepShape(*map(int, match.groups()))

    def measure() -> list[dict[str, Any]]:
        shapes = [shape(text) for text in args.shapes.split(",")]
        return run_step_benchmark(config_from_args(args, EngineConfig), shapes, repeat=args.repeat)

    return _run_table(args, context, "step", measure)


def _configure_structured(parser: argparse.ArgumentParser) -> None:
    numbers: dict[str, tuple[type, float, str]] = {
        "batch": (int, 8, "prompts at once"),
        "new_tokens": (int, 128, "tokens of each answer"),
        "repeat": (int, 7, "rounds; medians are reported"),
    }
    _add_numbers(parser, numbers)
    parser.set_defaults(run=_run_structured, numbers=tuple(numbers))
    add_config_arguments(parser, EngineConfig, omit={"enable_prefix_caching"})


def _run_structured(args: argparse.Namespace, context: Context) -> int:
    from flowkv_jax.bench.engine import benchmark_config
    from flowkv_jax.bench.structured import run_structured_benchmark
    from flowkv_jax.commands.loading import open_engine

    config = benchmark_config(config_from_args(args, EngineConfig))
    numbers = {name: getattr(args, name) for name in args.numbers}
    with open_engine(config, context, quiet=args.json) as engine:
        return _run_table(
            args, context, "structured", lambda: run_structured_benchmark(engine, **numbers)
        )


def _configure_layouts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--contexts",
        default="128,1024,4096",
        metavar="LIST",
        help="cached tokens of every row, with commas (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16", "float16"),
        help="of queries and cache (default: %(default)s)",
    )
    parser.add_argument(
        "--implementation",
        default="cpu",
        choices=("cpu", "xla", "gpu"),
        help="of paged attention (default: %(default)s)",
    )
    numbers: dict[str, tuple[type, float, str]] = {
        "batch": (int, 8, "rows"),
        "num_layers": (int, 30, "layers"),
        "num_kv_heads": (int, 3, "KV heads"),
        "group": (int, 3, "query heads a KV head"),
        "head_dim": (int, 64, "width of a head"),
        "block_size": (int, 16, "tokens in a block"),
        "repeat": (int, 9, "rounds; medians are reported"),
        "seed": (int, 0, "of the random contents"),
    }
    _add_numbers(parser, numbers)
    parser.set_defaults(run=_run_layouts, numbers=tuple(numbers))


def _run_layouts(args: argparse.Namespace, context: Context) -> int:
    from flowkv_jax.bench.layouts import run_layouts_benchmark

    def measure() -> list[dict[str, Any]]:
        contexts = [int(text) for text in args.contexts.split(",")]
        settings = {
            name: getattr(args, name) for name in ("dtype", "implementation", *args.numbers)
        }
        return run_layouts_benchmark(contexts, **settings)

    return _run_table(args, context, "layouts", measure)


def _configure_allocator(parser: argparse.ArgumentParser) -> None:
    numbers: dict[str, tuple[type, float, str]] = {
        "num_blocks": (int, 100_000, "blocks in the pool"),
        "occupancy": (float, 0.8, "share of them in use, in (0, 1)"),
        "request_blocks": (int, 64, "blocks of the timed request"),
        "iterations": (int, 5_000, "samples"),
        "seed": (int, 0, "of the requests that churn the pool"),
    }
    _add_numbers(parser, numbers)
    parser.set_defaults(run=_run_allocator)


def _configure_selector(parser: argparse.ArgumentParser) -> None:
    numbers: dict[str, tuple[type, float, str]] = {
        "num_gpus": (int, 8, "GPUs of the mock host"),
        "iterations": (int, 20_000, "samples of each kind"),
        "seed": (int, 0, "of the links' loads"),
    }
    _add_numbers(parser, numbers)
    parser.set_defaults(run=_run_selector)


def _configure_router(parser: argparse.ArgumentParser) -> None:
    numbers: dict[str, tuple[type, float, str]] = {
        "iterations": (int, 2000, "decisions at each size"),
        "seed": (int, 0, "of loads and prompts"),
    }
    _add_numbers(parser, numbers)
    parser.set_defaults(run=_run_router)


def _add_numbers(
    parser: argparse.ArgumentParser, numbers: dict[str, tuple[type, float, str]]
) -> None:
    for name, (kind, default, text) in numbers.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=kind,
            default=default,
            metavar="N" if kind is int else "X",
            help=f"{text} (default: {default})",
        )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def _run_allocator(args: argparse.Namespace, context: Context) -> int:
    from flowkv_jax.bench.allocator import run_allocator_benchmark

    names = ("num_blocks", "occupancy", "request_blocks", "iterations", "seed")
    return _run_figures(args, context, "allocator", run_allocator_benchmark, names)


def _run_selector(args: argparse.Namespace, context: Context) -> int:
    from flowkv_jax.bench.selector import run_selector_benchmark

    names = ("num_gpus", "iterations", "seed")
    return _run_figures(args, context, "selector", run_selector_benchmark, names)


def _run_router(args: argparse.Namespace, context: Context) -> int:
    from flowkv_jax.bench.router import run_router_benchmark

    def rows() -> list[dict[str, Any]]:
        figures = run_router_benchmark(_CLUSTER_SIZES, args.iterations, args.seed)
        return [{"nodes": size, **figures[f"nodes_{size}"]} for size in _CLUSTER_SIZES]

    return _run_table(args, context, "router", rows)


def _run_table(
    args: argparse.Namespace,
    context: Context,
    name: str,
    benchmark: Callable[[], list[dict[str, Any]]],
) -> int:
    """Run a benchmark that gives a row of figures a case, and print them."""
    from flowkv_jax.commands.progress import spinner

    try:
        with spinner(context.stderr, f"Measuring {name}", enabled=not args.json):
            rows = benchmark()
    except ValueError as error:
        raise ValidationError(str(error)) from error
    if args.json:
        _print_json(context, name, {"results": rows})
        return 0
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for heading in rows[0]:
        table.add_column(heading.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*[f"{v:,.2f}" if isinstance(v, float) else str(v) for v in row.values()])
    Console(file=context.stdout, width=None if context.stdout.isatty() else 200).print(table)
    return 0


def _print_json(context: Context, name: str, figures: dict[str, Any]) -> None:
    """A benchmark's figures, after what they were measured with."""
    from flowkv_jax import environment

    document = {
        "benchmark": name,
        "commit": environment.source_commit(),
        "versions": environment.versions(),
        "host": environment.host_facts(),
        **figures,
    }
    print(json.dumps(document, indent=2), file=context.stdout)


def _run_figures(
    args: argparse.Namespace,
    context: Context,
    name: str,
    benchmark: Callable[..., dict[str, Any]],
    settings: Sequence[str],
) -> int:
    """Run a benchmark that gives plain figures, and print them."""
    from flowkv_jax.commands.progress import spinner

    try:
        with spinner(context.stderr, f"Measuring the {name}", enabled=not args.json):
            figures = benchmark(**{setting: getattr(args, setting) for setting in settings})
    except ValueError as error:
        raise ValidationError(str(error)) from error
    if args.json:
        _print_json(context, name, figures)
        return 0
    width = max(map(len, figures))
    for key, value in figures.items():
        shown = f"{value:,.3f}" if isinstance(value, float) else f"{value:,}"
        print(f"{key:<{width}}  {shown}", file=context.stdout)
    return 0
