"""`flowkv chat`: a conversation in the terminal, or over a pipe with one message a line.

Ctrl-C while an answer streams stops that answer: closing the stream aborts the request, and what
was said so far stays in the history. Ctrl-C or Ctrl-D at the prompt ends the conversation.
"""

from __future__ import annotations

import argparse
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from flowkv_jax.commands import Context
from flowkv_jax.commands.generate import Figures
from flowkv_jax.commands.loading import for_few_requests, open_engine
from flowkv_jax.commands.options import (
    add_config_arguments,
    add_sampling_arguments,
    config_from_args,
    sampling_from_args,
)
from flowkv_jax.config import EngineConfig
from flowkv_jax.errors import ClientError, ValidationError
from flowkv_jax.outputs import RequestOutput
from flowkv_jax.sampling_params import SamplingParams

if TYPE_CHECKING:
    from flowkv_jax.engine.engine import Engine

SAMPLING_DEFAULTS = {"max_tokens": 512, "temperature": 0.0}
PROMPT = "> "
HELP = """\
/reset  forget the conversation (the system message stays)
/help   show this
/exit   leave (so do Ctrl-D, and Ctrl-C at the prompt)
Ctrl-C while the model answers stops the answer."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--quiet", "-q", action="store_true", help="print nothing but answers")
    add_sampling_arguments(
        parser, SAMPLING_DEFAULTS, omit={"n", "echo", "logprobs", "prompt_logprobs"}
    )
    add_config_arguments(parser, EngineConfig, omit={"seed"})


def run(args: argparse.Namespace, context: Context) -> int:
    params = sampling_from_args(args, SAMPLING_DEFAULTS)
    config = for_few_requests(config_from_args(args, EngineConfig), 1)
    with open_engine(config, context, quiet=args.quiet) as engine:
        conversation = Conversation(engine, params, context, system=args.system, quiet=args.quiet)
        return conversation.hold()


@dataclass(eq=False)
class Conversation:
    """The read-answer loop and its history."""

    engine: Engine
    params: SamplingParams
    context: Context
    system: str | None = None
    quiet: bool = False
    history: list[dict[str, str]] = field(default_factory=list)

    def hold(self) -> int:
        """Talk until the input ends. Returns the exit status: 2 if a piped message failed."""
        interactive = self.context.stdin.isatty()
        if interactive and not self.quiet:
            model = self.engine.model_info().served_model_name
            self._tell(f"Talking to {model}. /help lists what else you can type.")
        status = 0
        for line in self._lines(interactive):
            if line in ("/exit", "/quit"):
                break
            try:
                self._take(line)
            except ClientError as error:
                self._tell(f"error: {error}")
                status = 0 if interactive else 2
        return status

    def _lines(self, interactive: bool) -> Iterator[str]:
        """Non-empty lines until the input ends or, at the prompt, is interrupted."""
        if interactive:
            import readline  # noqa: F401  (importing it gives input() editing and history)
        while True:
            try:
                line = input(PROMPT) if interactive else self.context.stdin.readline()
            except (EOFError, KeyboardInterrupt):
                print(file=self.context.stdout)
                return
            except UnicodeDecodeError as error:
                raise ValidationError(
                    f"standard input is not {self.context.stdin.encoding} text: {error}",
                    parameter="prompt",
                ) from error
            if not interactive and not line:
                return
            if line.strip():
                yield line.strip()

    def _take(self, line: str) -> None:
        if line == "/reset":
            self.history.clear()
            self._tell("The conversation starts over.")
        elif line == "/help":
            self._tell(HELP)
        elif line.startswith("/"):
            self._tell(f"{line.split()[0]}: unknown command; /help lists them")
        else:
            self._answer(line)

    def _answer(self, question: str) -> None:
        """Ask with the whole history; a question that fails or gets no answer is not kept."""
        asked = [*self.history, {"role": "user", "content": question}]
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        said: list[str] = []
        last: RequestOutput | None = None
        try:
            stream = self.engine.chat([*system, *asked], self.params, stream=True)
            # Closing tells the engine to abort; leaving it to the collector would tell it later.
            with closing(cast("Generator[RequestOutput, None, None]", stream)) as outputs:
                for last in outputs:
                    said.append(last.outputs[0].delta_text)
                    self.context.stdout.write(said[-1])
                    self.context.stdout.flush()
        except KeyboardInterrupt:
            self._tell(" [stopped]")
        print(file=self.context.stdout, flush=True)
        if said:
            self.history[:] = [*asked, {"role": "assistant", "content": "".join(said)}]
        if last is not None and last.finished and not self.quiet and self.context.stderr.isatty():
            self._tell_figures(last)

    def _tell_figures(self, output: RequestOutput) -> None:
        info = self.engine.model_info()
        figures = Figures.of(output, info.block_size, info.num_blocks)
        parts = [f"{figures.output_tokens} tokens"]
        if figures.ttft_ms is not None:
            parts.append(f"TTFT {figures.ttft_ms:.0f} ms")
        if figures.output_tok_s is not None:
            parts.append(f"{figures.output_tok_s:.1f} tokens/s")
        self._tell("[" + ", ".join(parts) + "]")

    def _tell(self, message: str) -> None:
        print(message, file=self.context.stderr, flush=True)
