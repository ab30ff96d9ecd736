"""Flags made from the configuration structures and from `SamplingParams`.

Each field becomes one flag: `max_num_seqs` is `--max-num-seqs`, a boolean gets a `--no-` form, and
the help text is the field's line under "Attributes:" in the docstring, so there is one description
of each setting. A flag that is not given leaves no trace in the namespace: only what the user
typed overrides a configuration file.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from flowkv_jax.config import EngineConfig, ServeConfig, choices, flat_fields, load_config
from flowkv_jax.sampling_params import SamplingParams

_ConfigT = TypeVar("_ConfigT", EngineConfig, ServeConfig)

# Short or second spellings that users of other engines type.
_ALIASES: Mapping[str, tuple[str, ...]] = {
    "model": ("-m",),
    "tensor_parallel_size": ("-tp",),
}

# Sampling fields that do not fit one flag, or that a command line decides by itself.
_NOT_FLAGS = frozenset({"logit_bias", "detokenize", "output_kind", "structured_outputs"})

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B)?")
_UNIT_BYTES = {f"{u}B": 1000**i for i, u in enumerate("KMGT", 1)} | {
    f"{u}iB": 1024**i for i, u in enumerate("KMGT", 1)
}


def add_config_arguments(
    parser: argparse.ArgumentParser,
    config_type: type[EngineConfig] | type[ServeConfig],
    *,
    omit: Collection[str] = (),
) -> None:
    """Add `--config FILE`, and a flag for each leaf field of `config_type` but those in `omit`."""
    parser.add_argument("--config", metavar="FILE", help="YAML file; flags win over it")
    groups: dict[type, Any] = {}
    for name, (path, hint) in flat_fields(config_type).items():
        section = _section(config_type, path)
        if section not in groups:
            groups[section] = parser.add_argument_group(_title(section))
        if name not in omit:
            default = next(f.default for f in msgspec.structs.fields(section) if f.name == name)
            _add_flag(groups[section], "config", name, hint, default, field_help(section)[name])


def config_from_args(args: argparse.Namespace, config_type: type[_ConfigT]) -> _ConfigT:
    """The configuration of `--config`, overridden by the flags that were given.

    Raises:
        ConfigError: as `load_config`.
    """
    return load_config(config_type, args.config, _given(args, "config"))


def add_sampling_arguments(
    parser: argparse.ArgumentParser,
    defaults: Mapping[str, Any],
    *,
    omit: Collection[str] = (),
) -> None:
    """Add one flag for every field of `SamplingParams` but those in `omit`.

    `defaults` are those of the command, shown in its help; `sampling_from_args` wants them too.
    """
    group = parser.add_argument_group("How tokens are chosen, and when an answer ends")
    hints = get_type_hints(SamplingParams)
    help_texts = field_help(SamplingParams)
    for item in dataclasses.fields(SamplingParams):
        if item.name not in _NOT_FLAGS and item.name not in omit:
            default = defaults.get(item.name, item.default)
            _add_flag(
                group, "sampling", item.name, hints[item.name], default, help_texts[item.name]
            )


def sampling_from_args(args: argparse.Namespace, defaults: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters: the command's defaults, overridden by the flags that were given.

    Raises:
        ValidationError: a value is out of range.
    """
    return SamplingParams(**{**defaults, **_given(args, "sampling")})


def field_help(owner: type) -> dict[str, str]:
    """The "Attributes:" section of a class docstring: field name -> text on one line.

    An entry may name several fields ("host, port: where to listen"); each gets the text.
    """
    # From Python 3.13 on the compiler takes the indentation away; cleandoc does so on any version.
    _, _, section = inspect.cleandoc(owner.__doc__ or "").partition("Attributes:\n")
    texts: dict[str, str] = {}
    names: list[str] = []
    for line in section.splitlines():
        if line.strip() and not line.startswith(" " * 4):
            break
        entry = re.fullmatch(r" {4}(\w+(?:, \w+)*): (.*)", line)
        if entry:
            names = entry[1].split(", ")
            texts.update(dict.fromkeys(names, entry[2]))
        elif line.strip():
            texts.update({name: f"{texts[name]} {line.strip()}" for name in names})
    return texts


def parse_bytes(text: str) -> int:
    """Bytes from "1048576", "1MiB" (1024-based) or "1.5GB" (1000-based).

    Raises:
        argparse.ArgumentTypeError: anything else.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size; write bytes, or a number with KiB, MiB, GiB, TiB, KB, MB, GB, TB"
        )
    return int(float(match[1]) * _UNIT_BYTES[match[2]]) if match[2] else int(float(match[1]))


def _section(config_type: type, path: Iterable[str]) -> type:
    for name in path:
        config_type = get_type_hints(config_type)[name]
    return config_type


def _title(section: type) -> str:
    return (section.__doc__ or section.__name__).strip().splitlines()[0].rstrip(".")


def _given(args: argparse.Namespace, kind: str) -> dict[str, Any]:
    prefix = f"{kind}:"
    return {
        key.removeprefix(prefix): value
        for key, value in vars(args).items()
        if key.startswith(prefix)
    }


def _add_flag(
    group: Any, kind: str, name: str, hint: Any, default: Any, description: str | None
) -> None:
    """Add the flag of one field; its value lands under `kind:name`, out of the way of others."""
    if default is not None:
        description = f"{description} (default: {_shown(name, default)})"
    flags = [f"--{name.replace('_', '-')}", *_ALIASES.get(name, ())]
    settings: dict[str, Any] = {
        "dest": f"{kind}:{name}",
        "default": argparse.SUPPRESS,
        "help": (description or "").replace("%", "%%"),
    }
    kinds, may_be_none = _without_none(hint)
    if bool in kinds:
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, **settings)
        return
    element = next((_element(k) for k in kinds if get_origin(k) is not None and _element(k)), None)
    if element is not None:
        group.add_argument(
            *flags, action="append", type=element, metavar=_metavar(name, element), **settings
        )
        return
    values = choices(kinds[0])
    parse = str if values else _parser_of(name, kinds[0])
    group.add_argument(
        *flags,
        type=_or_none(parse) if may_be_none and parse is not str else parse,
        choices=values,
        metavar=None if values else _metavar(name, kinds[0]),
        **settings,
    )


def _shown(name: str, default: Any) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    if name.endswith("_bytes") and default and default % (1 << 20) == 0:
        return f"{default >> 20}MiB"
    return str(default)


def _without_none(hint: Any) -> tuple[list[Any], bool]:
    """The members of a union, without None, and whether None was one of them."""
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return [m for m in members if m is not type(None)], type(None) in members


def _element(hint: Any) -> Callable[[str], Any] | None:
    """The type of a sequence's elements; None for any other type."""
    origin = get_origin(hint)
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return typing.cast(Callable[[str], Any], get_args(hint)[0])
    return None


def _parser_of(name: str, hint: Any) -> Callable[[str], Any]:
    if name.endswith("_bytes"):
        return parse_bytes
    if hint in (int, float, str):
        return typing.cast(Callable[[str], Any], hint)
    raise TypeError(f"no flag can be made of {name}: {hint!r}")


def _or_none(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def parse_or_none(text: str) -> Any:
        return None if text.lower() == "none" else parse(text)

    parse_or_none.__name__ = getattr(parse, "__name__", "value")
    return parse_or_none


def _metavar(name: str, hint: Any) -> str:
    if name.endswith("_bytes"):
        return "SIZE"
    if name.endswith(("file", "_certs", "_template")):
        return "FILE"
    if name.endswith("_dir"):
        return "FOLDER"
    return {int: "N", float: "X", str: "TEXT"}.get(hint, "VALUE")
