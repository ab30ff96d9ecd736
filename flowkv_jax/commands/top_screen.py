"""A `Picture` as a screenful of text, for any width from 80 columns up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from flowkv_jax.cluster.dispatch_events import SequenceRecord
from flowkv_jax.commands.top_picture import Picture
from flowkv_jax.controller.decision_log import Decision
from flowkv_jax.controller.snapshot import NodeState, NodeView, Regime
from flowkv_jax.load import NodeLoad

WIDE_COLUMNS = 110
"""From here on there is room for more columns."""
SILENT_S = 2.0
"""Nodes report several times a second; one that has not for so long is marked."""
MAX_ROWS = 10
"""Of each list, where the screen has no height."""

_MIB = 1 << 20
_BAR_CELLS = 5
_STYLE_OF_REGIME = {
    Regime.NORMAL: "green",
    Regime.IMBALANCED: "yellow",
    Regime.EXTREME: "bold yellow",
}
_STYLE_OF_STATE = {
    NodeState.ACTIVE: "",
    NodeState.SWITCHING: "yellow",
    NodeState.LEAVING: "yellow",
    NodeState.DRAINED: "dim",
}


@dataclass(frozen=True, slots=True)
class Symbols:
    """What a terminal's encoding has room for."""

    arrow: str
    full: str
    empty: str
    ellipsis: str


UNICODE = Symbols("→", "█", "░", "…")
ASCII = Symbols("->", "#", ".", "~")


def render(
    picture: Picture,
    width: int,
    height: int | None = None,
    *,
    symbols: Symbols = UNICODE,
    remark: str | None = None,
) -> RenderableType:
    """
    Args:
        width, height: of the screen in characters; without a height lists have `MAX_ROWS` rows.
        remark: shown on top, such as why the picture is old.
    """
    screen = _Screen(picture, symbols, is_wide=width >= WIDE_COLUMNS)
    num_handoffs = num_decisions = MAX_ROWS
    if height is not None:
        # Two lines of heading, three lists of title and headings with a blank line before each.
        room = height - 2 - 3 * 3 - screen.num_node_lines - (remark is not None)
        num_decisions = max(2, room // 2)
        num_handoffs = max(2, room - num_decisions)
    parts: list[RenderableType] = [] if remark is None else [_remark(remark)]
    parts += screen.heading()
    parts += [Text(), screen.nodes()]
    parts += [Text(), screen.handoffs(picture.handoffs(num_handoffs))]
    parts += [Text(), screen.decisions(picture.notable_decisions(num_decisions))]
    return Group(*parts)


class _Screen:
    def __init__(self, picture: Picture, symbols: Symbols, *, is_wide: bool) -> None:
        self._picture = picture
        self._now_s = picture.snapshot.now_s
        self._symbols = symbols
        self._is_wide = is_wide

    @property
    def num_node_lines(self) -> int:
        return sum(1 + (self._plight(node) is not None) for node in self._picture.snapshot.nodes)

    def heading(self) -> list[RenderableType]:
        picture, snapshot = self._picture, self._picture.snapshot
        where = Text.assemble(
            ("flowkv top  ", "bold"), (_plain(picture.model), "bold cyan"), " at ",
            _plain(picture.target),
        )  # fmt: skip
        figures = Text.assemble(
            "regime ",
            (snapshot.regime.value, _STYLE_OF_REGIME[snapshot.regime]),
            f"  load: prefill {snapshot.prefill_load:.2f}, decode {snapshot.decode_load:.2f}",
            f"  {picture.requests_per_s:.1f} req/s  {picture.tokens_per_s:.0f} tok/s",
        )
        for line in (where, figures):
            line.no_wrap = True
            line.overflow = "ellipsis"
        return [where, figures]

    def nodes(self) -> Table:
        table = _table("nodes")
        names = ["left node", "left role", "run", "wait", "swap", "send", "recv", "left KV use"]
        names += ["frag", "C_p", "C_d", "queue"]
        if self._is_wide:
            names += ["booked", "prefill tok/s", "step ms", "age s"]
        for name in names:
            _add_column(table, name)
        for node in self._picture.snapshot.nodes:
            table.add_row(*self._node(node), style=_STYLE_OF_STATE[node.state])
        return table

    def _node(self, node: NodeView) -> list[Text]:
        plight = self._plight(node)
        role = Text(node.role.value)
        if plight is not None:
            role.append(f"\n{plight}", style="yellow")
        cells = [Text(_plain(node.name)), role, *self._load(node.load)]
        cells += [
            _figure(node.prefill_load),
            _figure(node.decode_load),
            Text(_seconds(node.queue_s)),
        ]
        if self._is_wide:
            step_ms = None if node.decode_step_s is None else 1e3 * node.decode_step_s
            age_s = None if node.reported_s is None else self._now_s - node.reported_s
            cells += [
                Text(str(node.booked_work)),
                Text(f"{node.prefill_tokens_per_s:.0f}"),
                _figure(step_ms, 1),
                _figure(age_s, 1),
            ]
        return cells

    def _load(self, load: NodeLoad | None) -> list[Text]:
        if load is None:
            return [Text("-") for _ in range(7)]
        counts = (
            load.num_requests_running,
            load.num_requests_waiting,
            load.num_requests_swapped,
            load.num_requests_sending,
            load.num_requests_receiving,
        )
        cells = [Text(str(count), style="" if count else "dim") for count in counts]
        return [*cells, self._bar(load.kv_cache_usage), _figure(load.fragmentation)]

    def _bar(self, share: float) -> Text:
        share = min(max(share, 0.0), 1.0)
        cells = _BAR_CELLS * (2 if self._is_wide else 1)
        num_full = round(share * cells)
        style = "red" if share > 0.9 else "yellow" if share > 0.7 else "green"
        return Text.assemble(
            (self._symbols.full * num_full, style),
            (self._symbols.empty * (cells - num_full), "dim"),
            f" {share:4.0%}",
        )

    def _plight(self, node: NodeView) -> str | None:
        """What is not as usual with a node."""
        if node.next_role is not None:
            return f"{self._symbols.arrow} {node.next_role.value}"
        if node.state is not NodeState.ACTIVE:
            return str(node.state.value)
        if node.reported_s is not None and self._now_s - node.reported_s > SILENT_S:
            return f"mute {_seconds(self._now_s - node.reported_s)}"
        if node.role is not node.home_role:
            return f"home {node.home_role.value}"
        return None

    def handoffs(self, records: Sequence[SequenceRecord]) -> Table:
        table = _table("last hand-offs")
        if not records:
            return _nothing(table, "none yet")
        names = ["left way", "left path", "runs/calls", "reused", "MiB", "transfer ms"]
        if self._is_wide:
            names += ["wait ms", "prompt", "output", "ago", "free request"]
        for name in names:
            _add_column(table, name)
        for record in records:
            report = record.handoff
            if report is None:
                continue
            cells = [
                f"{_plain(report.src)} {self._symbols.arrow} {_plain(report.dst)}",
                f"{_plain(report.path)}/{_plain(report.backend)}",
                f"{report.runs}/{report.calls}",
                f"{report.num_reused_blocks}/{report.num_blocks}",
                f"{report.data_bytes / _MIB:.1f}",
                f"{1e3 * report.transfer_s:.2f}",
            ]
            if self._is_wide:
                cells += [
                    f"{1e3 * report.deferred_s:.2f}",
                    str(record.num_prompt_tokens),
                    str(record.num_output_tokens),
                    _seconds(self._now_s - record.ended_s),
                    _plain(record.request_id),
                ]
            table.add_row(*map(_cell, cells))
        return table

    def decisions(self, decisions: Sequence[Decision]) -> Table:
        table = _table("last decisions")
        if not decisions:
            return _nothing(table, "none yet")
        names = ["ago", "left kind", "left of", "left chosen", "free why"]
        for name in names:
            _add_column(table, name)
        table.columns[2].max_width = 22 if self._is_wide else 8
        for one in decisions:
            table.add_row(
                _cell(_seconds(self._now_s - one.time_s)),
                _cell(one.kind.value),
                _cell(_plain(one.subject)),
                _cell(_plain(one.chosen).replace("->", self._symbols.arrow)),
                _cell(_plain(one.reason + _terms(one) if self._is_wide else one.reason)),
            )
        return table


def _table(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="dim",
        box=None,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )


def _add_column(table: Table, name: str) -> None:
    """A column of figures; of text if its name begins with "left ", or with "free ": that one gives
    way where the screen is too narrow."""
    kind, _, heading = name.partition(" ")
    is_text = kind in ("left", "free")
    table.add_column(
        heading if is_text else name,
        justify="left" if is_text else "right",
        no_wrap=kind != "free",
        overflow="ellipsis",
    )


def _remark(words: str) -> Text:
    return Text(_plain(words), style="bold red", no_wrap=True, overflow="ellipsis")


def _cell(text: str) -> Text:
    return Text(text, no_wrap=True, overflow="ellipsis")


def _nothing(table: Table, words: str) -> Table:
    table.show_header = False
    table.add_column()
    table.add_row(Text(words, style="dim"))
    return table


def _terms(decision: Decision) -> str:
    """What it was decided by: costs of the best candidate for each purpose, or figures."""
    best = {one.purpose: one.cost_s for one in reversed(decision.candidates)}
    terms = [f"{purpose} {1e3 * cost_s:.0f} ms" for purpose, cost_s in reversed(best.items())]
    terms += [f"{name} {value:.3g}" for name, value in decision.terms.items()]
    return f" ({', '.join(terms)})" if terms else ""


def _figure(value: float | None, digits: int = 2) -> Text:
    return Text("-" if value is None else f"{value:.{digits}f}")


def _seconds(value: float) -> str:
    """A time in four characters or so."""
    if value < 9.95:
        return f"{max(value, 0.0):.1f}s"
    if value < 120:
        return f"{value:.0f}s"
    return f"{value / 60:.0f}m" if value < 7200 else f"{value / 3600:.0f}h"


def _plain(text: str) -> str:
    """Names come from elsewhere; none may steer the terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)
