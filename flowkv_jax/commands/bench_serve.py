"""`flowkv bench serve` and `flowkv bench serve-compare`: flags, and where the reports go."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

from flowkv_jax.commands import Context
from flowkv_jax.errors import FlowKVError, ValidationError

if TYPE_CHECKING:
    from flowkv_jax.bench.serve import ServeBench, Workload
    from flowkv_jax.bench.transfer_report import Table
    from flowkv_jax.rpc.client import Client

T = TypeVar("T")

_EXIT_FAILED, _EXIT_INTERRUPTED = 1, 130
_EVERY_ANSWER = 1_000_000
_ASK_TIMEOUT_S = 10.0


def configure(parser: argparse.ArgumentParser) -> None:
    _add_server(parser.add_argument_group("server"))
    _add_workload(parser.add_argument_group("what is asked"))
    _add_arrivals(parser.add_argument_group("when"))
    _add_report(parser.add_argument_group("report"))
    parser.set_defaults(run=run_serve)


def configure_compare(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("reports", nargs="+", metavar="FILE", help="JSON reports; the first is the base")
    add("--json", action="store_true", help="print the comparison as JSON")
    add("--markdown", action="store_true", help="print the table as Markdown")
    add("--plot", metavar="FILE", help="draw a PNG picture there; needs the extra `plots`")
    parser.set_defaults(run=run_compare)


def _add_server(group: Any) -> None:
    add = group.add_argument
    add(
        "--target",
        default="127.0.0.1:50051",
        metavar="HOST:PORT",
        help="of the server (default: %(default)s); a token is taken from FLOWKV_API_KEY",
    )
    add("--tls", action="store_true", help="use TLS")
    add("--tls-ca-file", metavar="FILE", help="PEM file of the authorities; implies --tls")
    add(
        "--timeout",
        type=float,
        default=600.0,
        metavar="X",
        help="seconds a request may take (default: %(default)s)",
    )
    add(
        "--max-retries",
        type=int,
        default=0,
        metavar="N",
        help="send a refused request again so often, after the delay the server names (default: 0)",
    )
    add(
        "--num-warmups",
        type=int,
        default=7,
        metavar="N",
        help="requests of each length before the first cell, in bursts of 1, 2, 4, ..: a server "
        "may compile its program for a batch size when it first sees one (default: %(default)s)",
    )


def _add_workload(group: Any) -> None:
    add = group.add_argument
    add(
        "--dataset-name",
        default="random",
        choices=("random", "prefix", "trace", "interference"),
        help="random tokens; with shared prefixes; a Mooncake trace; short prompts with long "
        "answers while long prompts arrive (default: %(default)s)",
    )
    add("--dataset-path", metavar="FILE", help="the trace, JSON lines")
    add(
        "--input-len",
        default="512",
        metavar="LIST",
        help="tokens of a prompt, with commas: a cell each (default: %(default)s)",
    )
    add("--output-len", type=int, default=128, metavar="N", help="tokens of an answer (default: "
        "%(default)s)")  # fmt: skip
    add("--num-prompts", type=int, default=100, metavar="N", help="requests in a cell (default: "
        "%(default)s)")  # fmt: skip
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="answers have exactly --output-len tokens; fewer is a failure (default: yes)",
    )
    add("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy (default: 0)")
    add("--seed", type=int, default=0, metavar="N", help="of prompts and times (default: 0)")
    add("--prefix-len", type=int, default=256, metavar="N", help="prefix: tokens of a prompt that "
        "are shared (default: %(default)s)")  # fmt: skip
    add("--num-prefixes", type=int, default=4, metavar="N", help="prefix: different ones (default: "
        "%(default)s)")  # fmt: skip
    add("--length-scale", type=float, default=1.0, metavar="X", help="trace: times all lengths "
        "(default: 1)")  # fmt: skip
    add("--rate-scale", type=float, default=1.0, metavar="X", help="trace: play it so much faster "
        "(default: 1)")  # fmt: skip
    add("--long-input-len", type=int, default=1024, metavar="N", help="interference: tokens of a "
        "long prompt (default: %(default)s)")  # fmt: skip
    add("--long-output-len", type=int, default=1, metavar="N", help="interference: tokens of its "
        "answer (default: 1)")  # fmt: skip
    add("--long-interval", type=float, default=2.0, metavar="X", help="interference: seconds "
        "between long prompts (default: %(default)s)")  # fmt: skip
    add("--num-long-prompts", type=int, default=8, metavar="N", help="interference: in a cell "
        "(default: %(default)s)")  # fmt: skip


def _add_arrivals(group: Any) -> None:
    add = group.add_argument
    add(
        "--request-rate",
        metavar="LIST",
        help="requests a second, with commas: a cell each; inf sends all at once (default: 1; of a "
        "trace: its own)",
    )
    add(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="X",
        help="1 is a Poisson process; below, burstier; above, more even (default: 1)",
    )
    add("--max-concurrency", type=int, metavar="N", help="calls open at once (default: no bound)")
    add("--max-duration", type=float, metavar="X", help="send nothing later than so many seconds "
        "into a cell")  # fmt: skip


def _add_report(group: Any) -> None:
    add = group.add_argument
    add(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="what a good request keeps to: ttft:200 tpot:50 e2el:5000, any of them",
    )
    add(
        "--percentiles",
        default="50,90,99",
        metavar="LIST",
        help="of every latency (default: %(default)s)",
    )
    add(
        "--check-answers",
        nargs="?",
        type=int,
        const=_EVERY_ANSWER,
        default=0,
        metavar="N",
        help="at the end ask all prompts again (or N a cell), one by one, and compare the tokens",
    )
    add("--allow-failures", action="store_true", help="exit with 0 though requests failed")
    add("--label", metavar="TEXT", help="name of this run in comparisons (default: the target)")
    add("--baseline", metavar="FILE", help="JSON report to show ratios to")
    add(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="print the report as JSON, or write it to FILE and print the tables",
    )
    add("--save-detailed", action="store_true", help="with every request's times in the JSON")
    add("--markdown", action="store_true", help="print the tables as Markdown")
    add("--output", "-o", metavar="FILE", help="write the JSON report there too")
    add("--plot", metavar="FILE", help="draw a PNG picture there; needs the extra `plots`")


def run_serve(args: argparse.Namespace, context: Context) -> int:
    """Exit status 1 if a request failed (unless that is allowed) or an answer came out differently,
    130 after Ctrl-C; with the report in every case."""
    from flowkv_jax import environment
    from flowkv_jax.bench.serve import Server, run_serve_benchmark
    from flowkv_jax.bench.serve_compare import read_report
    from flowkv_jax.bench.serve_figures import Slo
    from flowkv_jax.bench.serve_handoff import ServerHandoffs
    from flowkv_jax.bench.serve_plots import plot_serve
    from flowkv_jax.bench.serve_report import figures_of

    files = _files_to_write(args)
    _check_plot(args)
    slo, percentiles = Slo.parse(args.goodput), _percentiles(args.percentiles)
    baseline = read_report(Path(args.baseline)) if args.baseline else None
    bench = _bench(args)
    server = Server(
        target=args.target,
        api_key=os.environ.get("FLOWKV_API_KEY"),
        tls=args.tls,
        tls_ca_file=args.tls_ca_file,
    )
    begin = perf_counter()
    with _progress(context) as (progress, live), server.client() as client:
        handoffs = ServerHandoffs(client.cluster) if _shows_cluster(client) else None
        run = run_serve_benchmark(bench, server, handoffs=handoffs, progress=progress, live=live)
    document = {
        "benchmark": "serve",
        "label": args.label or args.target,
        "target": args.target,
        "commit": environment.source_commit(),
        "versions": environment.versions(),
        "host": environment.host_facts(),
        "seconds": perf_counter() - begin,
        "settings": _settings(args, bench),
        **figures_of(run, percentiles, slo, detailed=args.save_detailed),
    }
    for file in files:
        file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if args.plot and run.cells:
        plot_serve([document] if baseline is None else [baseline, document], Path(args.plot))
    if args.json:
        print(json.dumps(document, indent=2), file=context.stdout)
    else:
        _print_report(document, baseline, args, context)
    if run.is_interrupted:
        return _EXIT_INTERRUPTED
    if run.num_different or (run.num_failed and not args.allow_failures):
        return _EXIT_FAILED
    return 0


def _shows_cluster(client: Client) -> bool:
    """False as well for a server that does not answer: the benchmark says so in better words."""
    try:
        return client.cluster.is_offered(timeout=_ASK_TIMEOUT_S)
    except FlowKVError:
        return False


def _files_to_write(args: argparse.Namespace) -> list[Path]:
    """Where the JSON goes; `args.json` is afterwards whether it is printed.

    Raises:
        ValidationError: a folder does not exist.
    """
    files = [file for file in (args.json, args.output) if file not in (None, "-")]
    args.json = args.json == "-"
    for file in files:
        if not Path(file).parent.is_dir():
            raise ValidationError(
                f"--json, --output: there is no folder {Path(file).parent}", parameter="output"
            )
    return [Path(file) for file in files]


def _check_plot(args: argparse.Namespace) -> None:
    """
    Raises:
        ValidationError: a plot is wanted, and matplotlib or the folder is missing.
    """
    from flowkv_jax.bench.plots import check_plotting

    if args.plot:
        check_plotting()
        if not Path(args.plot).parent.is_dir():
            raise ValidationError(
                f"--plot: there is no folder {Path(args.plot).parent}", parameter="plot"
            )


def _print_report(
    document: dict[str, Any],
    baseline: dict[str, Any] | None,
    args: argparse.Namespace,
    context: Context,
) -> None:
    from flowkv_jax.bench.serve_report import notes, tables

    shown, remarks = tables(document), notes(document)
    if baseline is not None:
        from flowkv_jax.bench.serve_compare import comparison_table, differences

        shown.append(comparison_table([baseline, document]))
        remarks = [*differences([baseline, document]), *remarks]
    _print_tables(shown, remarks, context, as_markdown=args.markdown)


def _bench(args: argparse.Namespace) -> ServeBench:
    from flowkv_jax.bench.serve import ServeBench
    from flowkv_jax.bench.serve_client import Asking

    return ServeBench(
        workload=_workload(args),
        asking=Asking(
            temperature=args.temperature,
            ignore_eos=args.ignore_eos,
            timeout_s=args.timeout,
            max_retries=args.max_retries,
            max_concurrency=args.max_concurrency,
        ),
        num_warmups=args.num_warmups,
        max_duration_s=args.max_duration,
        num_checked=args.check_answers,
    )


def _workload(args: argparse.Namespace) -> Workload:
    from flowkv_jax.bench.serve_trace import TraceWorkload
    from flowkv_jax.bench.serve_workload import InterferenceWorkload, RandomWorkload

    rates = _listed("request-rate", args.request_rate or "", float)
    lengths = _listed("input-len", args.input_len, int)
    common = {"num_prompts": args.num_prompts, "seed": args.seed}
    if args.dataset_name == "trace":
        if args.dataset_path is None:
            raise ValidationError(
                "--dataset-name trace needs --dataset-path FILE", parameter="dataset_path"
            )
        return TraceWorkload(
            path=Path(args.dataset_path),
            length_scale=args.length_scale,
            rate_scale=args.rate_scale,
            request_rates=rates,
            **common,
        )
    common |= {
        "output_len": args.output_len,
        "request_rates": rates or (1.0,),
        "burstiness": args.burstiness,
    }
    if args.dataset_name == "interference":
        if len(lengths) != 1:
            raise ValidationError(
                f"--input-len {args.input_len}: interference takes one length",
                parameter="input_len",
            )
        return InterferenceWorkload(
            input_len=lengths[0],
            long_input_len=args.long_input_len,
            long_output_len=args.long_output_len,
            long_interval_s=args.long_interval,
            num_long_prompts=args.num_long_prompts,
            **common,
        )
    if args.dataset_name == "prefix":
        common |= {"prefix_len": args.prefix_len, "num_prefixes": args.num_prefixes}
    return RandomWorkload(input_lens=lengths, **common)


def _settings(args: argparse.Namespace, bench: ServeBench) -> dict[str, Any]:
    workload: dict[str, Any] = asdict(bench.workload)  # type: ignore[call-overload]
    return {
        "dataset": args.dataset_name,
        "seed": args.seed,
        "workload": {name: _plain(value) for name, value in workload.items()},
        "asking": asdict(bench.asking),
        "num_warmups": bench.num_warmups,
        "max_duration_s": bench.max_duration_s,
        "percentiles": args.percentiles,
    }


def _plain(value: Any) -> Any:
    """As JSON gives it back: it has neither tuples nor infinity."""
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path) or value == math.inf:
        return str(value)
    return value


def _percentiles(text: str) -> tuple[float, ...]:
    found = _listed("percentiles", text, float)
    for percentile in found:
        if not 0 <= percentile <= 100:
            raise ValidationError(
                f"--percentiles: {percentile:g} is not in [0, 100]", parameter="percentiles"
            )
    if 50 not in found:
        found = (50.0, *found)
    return found


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
            expected = "a whole number" if kind is int else "a number"
            raise ValidationError(
                f"--{flag}: {name!r} is not {expected}", parameter=flag, value=name
            ) from None
    return tuple(found)


@contextmanager
def _progress(
    context: Context,
) -> Iterator[tuple[Callable[[str], None], Callable[[str], None]]]:
    """Callbacks: for lines that stay, and for the one that says how far it is, on a terminal."""
    begin = perf_counter()

    def stamped(line: str) -> str:
        return f"[{perf_counter() - begin:5.1f} s] {line}"

    if not context.stderr.isatty():
        yield (
            lambda line: print(stamped(line), file=context.stderr, flush=True),
            lambda line: None,
        )
        return
    from rich.console import Console
    from rich.markup import escape

    console = Console(file=context.stderr)
    with console.status("") as status:
        yield (
            lambda line: console.print(stamped(line), markup=False, highlight=False),
            lambda line: status.update(escape(stamped(line))),
        )


def _print_tables(
    tables: Sequence[Table], notes: Sequence[str], context: Context, *, as_markdown: bool
) -> None:
    if as_markdown:
        from flowkv_jax.bench.transfer_report import markdown

        print(markdown(tables, notes), file=context.stdout, end="")
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable

    console = Console(file=context.stdout, width=None if context.stdout.isatty() else 200)
    for table in tables:
        shown = RichTable(
            title=table.title,
            title_justify="left",
            box=box.SIMPLE_HEAD,
            collapse_padding=True,
            pad_edge=False,
        )
        for index, heading in enumerate(table.headings):
            if index < table.num_names:
                shown.add_column(heading, no_wrap=index == 0)
            else:
                # A word a line, so that all columns fit a narrow terminal.
                shown.add_column(heading.replace(" ", "\n"), justify="right")
        for row in table.rows:
            shown.add_row(*row)
        console.print(shown)
    for note in notes:
        console.print(note, soft_wrap=True, highlight=False, markup=False)


def run_compare(args: argparse.Namespace, context: Context) -> int:
    """Print JSON reports side by side."""
    from flowkv_jax.bench.serve_compare import (
        compare,
        comparison_table,
        differences,
        read_report,
    )
    from flowkv_jax.bench.serve_plots import plot_serve

    _check_plot(args)
    documents = [read_report(Path(name)) for name in args.reports]
    found = differences(documents)
    if args.plot:
        plot_serve(documents, Path(args.plot))
    if args.json:
        report = {"benchmark": "serve-compare", "rows": compare(documents), "differences": found}
        print(json.dumps(report, indent=2), file=context.stdout)
    else:
        _print_tables([comparison_table(documents)], found, context, as_markdown=args.markdown)
    return 0
