"""The `flowkv` command.

Names are resolved here and modules imported only when their command was given, so that
`flowkv --help` answers without importing JAX. This is also where errors become exit statuses:

    0    done
    1    the server side failed (`ServerError`, a deadline, a cancelled request)
    2    the caller can fix it (`ClientError`), or the command line itself is wrong
    130  interrupted by Ctrl-C
    141  whoever read the output went away (as a process ended by SIGPIPE)

With `--json`, standard output holds a JSON document in every case: an error is
`{"error": {"type", "message", "parameter"}}`, and goes to standard error as well.

Anything outside the error tree, but for what the system refuses (a full disk), is a bug of ours and
keeps its traceback.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, TextIO

from flowkv_jax import __version__
from flowkv_jax.errors import ClientError, FlowKVError

if TYPE_CHECKING:
    from flowkv_jax.commands import Context

EXIT_FAILED, EXIT_CLIENT, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 1, 2, 130, 141

Configure = Callable[[argparse.ArgumentParser], None]
Run = Callable[[argparse.Namespace, "Context"], int]


@dataclass(frozen=True)
class Command:
    """A subcommand: one line of help, what follows its name, how to get at its two functions."""

    summary: str
    usage: str
    load: Callable[[], tuple[Configure, Run]]


def _module(name: str) -> Callable[[], tuple[Configure, Run]]:
    def load() -> tuple[Configure, Run]:
        module = importlib.import_module(f"flowkv_jax.commands.{name}")
        return module.configure, module.run

    return load


COMMANDS: dict[str, Command] = {
    "generate": Command(
        "complete one prompt and show how fast it went", "[options] [PROMPT]", _module("generate")
    ),
    "chat": Command("talk to the model in the terminal", "[options]", _module("chat")),
    "serve": Command(
        "serve the model over HTTP (OpenAI's API) and gRPC", "[options] [MODEL]", _module("serve")
    ),
    "worker": Command(
        "be one node of a cluster that `flowkv serve` drives",
        "--controller HOST:PORT [options]",
        _module("worker"),
    ),
    "top": Command("show what the nodes of a server do", "[options]", _module("top")),
    "trace": Command(
        "save the latest requests of a server as a timeline", "[options]", _module("trace")
    ),
    "pull": Command("fetch a model into the cache folder", "[options] [NAME]", _module("pull")),
    "doctor": Command(
        "show devices, versions, and what would be used", "[options]", _module("doctor")
    ),
    "bench": Command(
        "measure the engine, its parts, and transfers", "TARGET [options]", _module("bench")
    ),
}


def main(argv: Sequence[str] | None = None, context: Context | None = None) -> int:
    """Run one command and return its exit status.

    Raises:
        SystemExit: from argparse, for `--help` (0) and a wrong command line (2).
    """
    _prepare_streams()
    top = _top_parser()
    chosen = top.parse_args(argv)
    name: str | None = chosen.command
    if name is None:
        top.print_help(sys.stderr)
        return EXIT_CLIENT
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else "commands: " + ", ".join(COMMANDS)
        top.error(f"unknown command {name!r}; {hint}")
    command = COMMANDS[name]
    configure, run = command.load()
    parser_type = _JsonParser if "--json" in chosen.arguments else argparse.ArgumentParser
    parser = parser_type(
        prog=f"flowkv {name}",
        usage=f"flowkv {name} {command.usage}",
        description=command.summary[0].upper() + command.summary[1:] + ".",
        allow_abbrev=False,
    )
    configure(parser)
    args, unknown = parser.parse_known_args(chosen.arguments)
    if unknown:
        parser.error(_about_unknown(unknown))
    if context is None:
        from flowkv_jax.commands import Context

        context = Context()
    return _run_guarded(parser.prog, run, args, context)


_ELSEWHERE = {
    "--api-key": "keys come from --api-key-file or the environment variable FLOWKV_API_KEY",
    "--enable-auto-tool-choice": "tools are always on; --tool-call-parser says how calls are read",
    "--kv-transfer-config": "see --kv-role, --kv-host and --kv-port, or --prefill-nodes",
    "--disaggregation-mode": "see --kv-role, or --prefill-nodes and --decode-nodes",
}
"""Flags that other servers have, and what is here in their place."""


def _about_unknown(arguments: Sequence[str]) -> str:
    hints = [_ELSEWHERE[flag] for a in arguments if (flag := a.partition("=")[0]) in _ELSEWHERE]
    return "; ".join([f"unrecognized arguments: {' '.join(arguments)}", *hints])


def _run_guarded(prog: str, run: Run, args: argparse.Namespace, context: Context) -> int:
    try:
        status = run(args, context)
        context.stdout.flush()
        return status
    except BrokenPipeError:
        _discard_output(context.stdout)
        return EXIT_BROKEN_PIPE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except FlowKVError as error:
        if getattr(args, "json", False):
            parameter = getattr(error, "parameter", None)
            _print_json_error(type(error).__name__, str(error), parameter, context.stdout)
        print(f"{prog}: error: {error}", file=context.stderr)
        return EXIT_CLIENT if isinstance(error, ClientError) else EXIT_FAILED
    except OSError as error:
        _discard_output(context.stdout)
        print(f"{prog}: error: {error}", file=context.stderr)
        return EXIT_FAILED


class _JsonParser(argparse.ArgumentParser):
    """Tells of a wrong command line in JSON too; so do its subparsers, which are of its type."""

    def error(self, message: str) -> NoReturn:
        _print_json_error("UsageError", message, None, sys.stdout)
        super().error(message)


def _print_json_error(kind: str, message: str, parameter: str | None, stdout: TextIO) -> None:
    error = {"type": kind, "message": message, "parameter": parameter}
    print(json.dumps({"error": error}), file=stdout, flush=True)


def _prepare_streams() -> None:
    """A stream that was closed before the start reads and writes nothing; a character that the
    terminal's encoding lacks is replaced."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _discard_output(stdout: TextIO) -> None:
    """Point the descriptor elsewhere: the interpreter flushes it once more on its way out."""
    if stdout is sys.stdout:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())


def _top_parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    listing = "\n".join(f"  {name:<{width}}  {c.summary}" for name, c in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="flowkv",
        usage="flowkv [-h] [--version] COMMAND ...",
        description="Serve Llama models with JAX: block-major KV cache, continuous batching.",
        epilog=f"commands:\n{listing}\n\n`flowkv COMMAND --help` explains one command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"flowkv-jax {__version__}")
    parser.add_argument("command", nargs="?", metavar="COMMAND", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
