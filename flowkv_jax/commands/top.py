"""`flowkv top`: what the nodes of a server do, live in the terminal.

Without a terminal, with `--once` or with `--json` it looks once. Ctrl-C ends the live view, which
is no failure.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from flowkv_jax.checks import check_real
from flowkv_jax.commands import Context
from flowkv_jax.errors import FlowKVError, RetryableRequestError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from flowkv_jax.commands.top_picture import Observer, Picture
    from flowkv_jax.rpc.client import Client

_TIMEOUT_S = 10.0
_PLAIN_COLUMNS = 120


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--target",
        default="127.0.0.1:50051",
        metavar="HOST:PORT",
        help="of the server (default: %(default)s); a token is taken from FLOWKV_API_KEY",
    )
    add("--tls", action="store_true", help="use TLS")
    add("--tls-ca-file", metavar="FILE", help="PEM file of the authorities; implies --tls")
    add("--interval", type=float, default=1.0, metavar="X", help="seconds between two looks "
        "(default: %(default)s)")  # fmt: skip
    add("--once", action="store_true", help="look once and print it")
    add("--json", action="store_true", help="look once and print all that is known as JSON")


def run(args: argparse.Namespace, context: Context) -> int:
    """Exit status 0 also after Ctrl-C in the live view.

    Raises:
        RetryableRequestError: no server answers.
        UnprocessableError: it does not offer the service.
    """
    from rich.console import Console

    from flowkv_jax.commands.top_picture import Observer
    from flowkv_jax.rpc.client import Client

    check_real("interval", args.interval, 0.1, 60.0)
    with Client(
        args.target,
        api_key=os.environ.get("FLOWKV_API_KEY"),
        tls=args.tls,
        tls_ca_file=args.tls_ca_file,
        timeout=_TIMEOUT_S,
    ) as client:
        observer = Observer(client.cluster, args.target, _model_of(client, args.target))
        picture = observer.look()
        if args.json:
            print(json.dumps(picture.to_dict(), indent=2), file=context.stdout)
            return 0
        is_terminal = context.stdout.isatty()
        width = None if is_terminal or "COLUMNS" in os.environ else _PLAIN_COLUMNS
        console = Console(file=context.stdout, width=width, highlight=False)
        if is_terminal and not args.once:
            with suppress(KeyboardInterrupt):
                _show_live(picture, observer, console, args.interval)
        else:
            console.print(_screen(picture, console, None))
    return 0


def _show_live(
    picture: Picture, observer: Observer, console: Console, interval_s: float
) -> NoReturn:
    """Look and show until interrupted. A server that is away for a while is waited for."""
    from rich.live import Live

    seen_s, remark = time.monotonic(), None
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(_screen(picture, console, console.height, remark), refresh=True)
            time.sleep(interval_s)
            try:
                picture = observer.look()
                seen_s, remark = time.monotonic(), None
            except FlowKVError as error:
                remark = f"no news for {time.monotonic() - seen_s:.0f} s: {error}"


def _screen(
    picture: Picture, console: Console, height: int | None, remark: str | None = None
) -> RenderableType:
    from flowkv_jax.commands.top_screen import ASCII, UNICODE, render

    symbols = ASCII if console.options.ascii_only else UNICODE
    return render(picture, console.width, height, symbols=symbols, remark=remark)


def _model_of(client: Client, target: str) -> str:
    try:
        return client.model_info().served_model_name
    except (RetryableRequestError, TimeoutError) as error:
        raise RetryableRequestError(
            f"no server answers at {target} ({error}); start one with `flowkv serve`, or say where "
            "it is with --target HOST:PORT"
        ) from error
