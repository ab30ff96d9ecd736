"""`flowkv generate`: one prompt in, text on standard output, figures on standard error."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO, cast

from flowkv_jax.commands import Context
from flowkv_jax.commands.loading import for_few_requests, open_engine
from flowkv_jax.commands.options import (
    add_config_arguments,
    add_sampling_arguments,
    config_from_args,
    sampling_from_args,
)
from flowkv_jax.commands.progress import spinner
from flowkv_jax.config import EngineConfig
from flowkv_jax.errors import ValidationError
from flowkv_jax.outputs import RequestOutput
from flowkv_jax.sampling_params import SamplingParams
from flowkv_jax.sequence import HandoffReport

Answer = list[RequestOutput] | Iterator[RequestOutput]

# A command answers the same way twice, unless asked otherwise.
SAMPLING_DEFAULTS: Mapping[str, Any] = {"max_tokens": 128, "temperature": 0.0}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompt", nargs="?", help="what to complete; `-`, or nothing with a pipe, reads it"
    )
    parser.add_argument(
        "--chat", action="store_true", help="ask the prompt as a question, in the model's template"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message; needs --chat")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--quiet", "-q", action="store_true", help="print nothing but the text")
    parser.add_argument(
        "--warmup",
        action="store_true",
        help="ask once without showing it, so that the figures are those of a running engine and"
        " not of one that still compiles",
    )
    add_sampling_arguments(parser, SAMPLING_DEFAULTS)
    # `--seed` is the request's: with one request, the engine's would do the same.
    add_config_arguments(parser, EngineConfig, omit={"seed"})


def run(args: argparse.Namespace, context: Context) -> int:
    if args.system is not None and not args.chat:
        raise ValidationError("--system needs --chat", parameter="system", value=args.system)
    prompt = read_prompt(args.prompt, context.stdin)
    params = sampling_from_args(args, SAMPLING_DEFAULTS)
    config = for_few_requests(config_from_args(args, EngineConfig), params.n)
    quiet = args.quiet or args.json
    with open_engine(config, context, quiet=quiet) as engine:

        def ask(params: SamplingParams, *, stream: bool) -> Answer:
            if args.chat:
                return engine.chat(_messages(args.system, prompt), params, stream=stream)
            return engine.generate(prompt, params, stream=stream)

        if args.warmup:
            # Two tokens run the prefill of this prompt and a decode.
            with spinner(context.stderr, "Compiling", enabled=not quiet):
                ask(dataclasses.replace(params, max_tokens=2, min_tokens=0), stream=False)
            engine.reset_prefix_cache()
        # Single answers stream; several would mix on the terminal.
        stream = params.n == 1 and not args.json
        answer = ask(params, stream=stream)
        if stream:
            output = print_stream(cast("Iterator[RequestOutput]", answer), context.stdout)
            # Flushed, so that the figures come after the text where both go to one place.
            print(file=context.stdout, flush=True)
        else:
            output = cast("list[RequestOutput]", answer)[0]
        info = engine.model_info()
        figures = Figures.of(output, info.block_size, info.num_blocks)
        records = engine.cluster.records(params.n)
        handoffs = [record.handoff for record in records if record.handoff is not None]
    if args.json:
        document = {
            "model": info.served_model_name,
            "output": output.to_dict(),
            "figures": figures.to_dict(),
            "handoffs": [dataclasses.asdict(handoff) for handoff in handoffs],
        }
        print(json.dumps(document), file=context.stdout)
    elif not stream:
        _print_answers(output, context.stdout)
    if not quiet:
        print_figures(figures, context.stderr)
        print_handoffs(handoffs, context.stderr)
    return 0


def read_prompt(given: str | None, stdin: TextIO) -> str:
    """The prompt from the command line, or from a pipe.

    Raises:
        ValidationError: none was given and nothing is piped in.
    """
    if given is not None and given != "-":
        return given
    if given is None and stdin.isatty():
        raise ValidationError("no prompt: give one, or pipe it in", parameter="prompt", value=None)
    # A pipe's last newline comes from the tool that wrote it (`echo`), not from the prompt.
    try:
        return stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ValidationError(
            f"the prompt on standard input is not {stdin.encoding} text: {error}",
            parameter="prompt",
        ) from error


def print_stream(stream: Iterator[RequestOutput], stdout: TextIO) -> RequestOutput:
    """Write the text as it comes; returns the last output, which has all of it."""
    output: RequestOutput | None = None
    for output in stream:
        stdout.write(output.outputs[0].delta_text)
        stdout.flush()
    if output is None:
        raise RuntimeError("the engine ended a stream without an output")
    return output


@dataclass(frozen=True, slots=True)
class Figures:
    """What one request took.

    Attributes:
        ttft_ms: time to first token; None where the engine kept no times.
        tpot_ms: time per output token after the first.
        output_tok_s: output tokens of all answers over the time from arrival to last token.
        kv_blocks: blocks that hold the K/V of prompt and answers. The last token of an answer is
            never fed back, so it needs none; answers of one prompt share its full blocks.
    """

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_ms: float | None
    tpot_ms: float | None
    output_tok_s: float | None
    kv_blocks: int
    num_blocks: int

    @classmethod
    def of(cls, output: RequestOutput, block_size: int, num_blocks: int) -> Figures:
        num_prompt = len(output.prompt_token_ids)
        lengths = [len(answer.token_ids) for answer in output.outputs]
        shared = num_prompt // block_size
        kv_blocks = shared + sum(
            -(-(num_prompt + max(length - 1, 0)) // block_size) - shared for length in lengths
        )
        metrics = output.metrics
        ttft_s = metrics.ttft_s if metrics else None
        tpot_s = metrics.tpot_s(max(lengths)) if metrics else None
        whole_s = 0.0
        if metrics is not None and metrics.last_token_ts is not None:
            whole_s = metrics.last_token_ts - metrics.arrival_time
        return cls(
            prompt_tokens=num_prompt,
            cached_tokens=output.num_cached_tokens,
            output_tokens=sum(lengths),
            ttft_ms=None if ttft_s is None else 1e3 * ttft_s,
            tpot_ms=None if tpot_s is None else 1e3 * tpot_s,
            output_tok_s=sum(lengths) / whole_s if whole_s > 0 else None,
            kv_blocks=kv_blocks,
            num_blocks=num_blocks,
        )

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def print_figures(figures: Figures, stderr: TextIO) -> None:
    """A small table."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    def shown(value: float | None, digits: int = 1) -> str:
        return "-" if value is None else f"{value:,.{digits}f}"

    table = Table(box=box.ROUNDED)
    row = {
        "TTFT ms": shown(figures.ttft_ms),
        "TPOT ms": shown(figures.tpot_ms),
        "tokens/s": shown(figures.output_tok_s),
        "tokens in": str(figures.prompt_tokens),
        "tokens out": str(figures.output_tokens),
        "KV blocks used": f"{figures.kv_blocks} of {figures.num_blocks}",
    }
    for name in row:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row(*row.values())
    Console(file=stderr).print(table)


def print_handoffs(handoffs: Sequence[HandoffReport], stderr: TextIO) -> None:
    """One line for each: how the prompt's KV cache came to where it was decoded."""
    for handoff in handoffs:
        print(
            f"KV hand-off {handoff.src} -> {handoff.dst}: path {handoff.path}, backend"
            f" {handoff.backend}, runs {handoff.runs}, calls {handoff.calls},"
            f" {handoff.data_bytes:,} bytes, {1e3 * handoff.total_s:.2f} ms",
            file=stderr,
        )


def _messages(system: str | None, prompt: str) -> list[dict[str, str]]:
    messages = [{"role": "user", "content": prompt}]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def _print_answers(output: RequestOutput, stdout: TextIO) -> None:
    for answer in output.outputs:
        print(f"--- {answer.index + 1} of {len(output.outputs)}", file=stdout)
        print(answer.text, file=stdout)
