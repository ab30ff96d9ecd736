"""`flowkv pull`: bring a known model into the cache folder."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from flowkv_jax.commands import Context
from flowkv_jax.commands.progress import pull_bar
from flowkv_jax.config import DEFAULT_MODEL
from flowkv_jax.models import hub


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", default=DEFAULT_MODEL, help=f"default: {DEFAULT_MODEL}")
    parser.add_argument("--list", action="store_true", help="list the names, fetch nothing")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quiet", "-q", action="store_true", help="show no progress")


def run(args: argparse.Namespace, context: Context) -> int:
    if args.list:
        _list_models(context, as_json=args.json)
        return 0
    path = _fetch(args.name, context, quiet=args.quiet)
    document = {"name": args.name, "path": str(path), "size_bytes": path.stat().st_size}
    print(json.dumps(document) if args.json else path, file=context.stdout)
    return 0


def fetch_if_known(model: str, context: Context, *, quiet: bool) -> None:
    """Fetch `model` if it is a known name that is not here yet; anything else is a path."""
    if model in hub.KNOWN_MODELS and not hub.is_present(model):
        _fetch(model, context, quiet=quiet)


def _fetch(name: str, context: Context, *, quiet: bool) -> Path:
    with pull_bar(context.stderr, name, enabled=not quiet) as progress:
        return context.fetch_model(name, progress)


def _list_models(context: Context, *, as_json: bool) -> None:
    models = [
        {
            "name": model.name,
            "size_bytes": model.num_bytes,
            "license": model.license,
            "is_present": hub.is_present(model.name),
        }
        for model in hub.KNOWN_MODELS.values()
    ]
    if as_json:
        print(json.dumps(models), file=context.stdout)
        return
    for model in hub.KNOWN_MODELS.values():
        here = "here" if hub.is_present(model.name) else "not fetched"
        size = f"{model.num_bytes / 1e6:.0f} MB"
        print(f"{model.name}  {size}  {model.license}  {here}", file=context.stdout)
