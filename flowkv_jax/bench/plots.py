"""Pictures of benchmark reports. Needs matplotlib: the extra `plots`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from flowkv_jax.bench.transfer_report import Figures
from flowkv_jax.errors import ValidationError
from transfer.strategies import Strategy

_STYLES = {
    Strategy.LAYER_MAJOR.value: ":",
    Strategy.BLOCK_MAJOR.value: "--",
    Strategy.ALIGNED_RUNS.value: "-",
}


def check_plotting() -> Any:
    """matplotlib's `Figure`.

    Raises:
        ValidationError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValidationError(
            f"a plot needs matplotlib: pip install 'flowkv-jax[plots]' ({error})", parameter="plot"
        ) from None
    return Figure


def plot_transfer(figures: Sequence[Figures], path: Path) -> None:
    """Time over input length, a panel for each placement: colour is backend, line is strategy.

    Args:
        figures: of large transfers; at least one.
        path: of a new PNG file.

    Raises:
        ValidationError: matplotlib is not installed.
    """
    placements = list(dict.fromkeys(f.placement for f in figures))
    backends = list(dict.fromkeys(f.system for f in figures))
    picture = check_plotting()(figsize=(7 * len(placements), 5.5), layout="constrained")
    panels = picture.subplots(1, len(placements), sharey=True, squeeze=False)[0]
    for panel, placement in zip(panels, placements, strict=True):
        here = [f for f in figures if f.placement == placement]
        for i, backend in enumerate(backends):
            for strategy, style in _STYLES.items():
                line = [f for f in here if f.system == backend and f.strategy == strategy]
                if line:
                    label = f"{backend}, {strategy}"
                    _draw(panel, line, [f.seconds for f in line], f"C{i}{style}", label)
        copied = [f for f in here if f.system == backends[0] and f.copies_s]
        copied = [f for f in copied if f.strategy == copied[0].strategy]
        _draw(panel, copied, [median(f.copies_s) for f in copied], "k-", "plain copy, one process")
        panel.set(xscale="log", yscale="log", title=f"{placement} pools", xlabel="input tokens")
        panel.grid(True, which="both", alpha=0.2)
    panels[0].set_ylabel("transfer, s")
    panels[-1].legend(fontsize="x-small", ncols=2)
    picture.savefig(path, dpi=150, format="png")


def _draw(
    panel: Any, figures: Sequence[Figures], seconds: Sequence[float], style: str, label: str
) -> None:
    tokens = [int(f.case) for f in figures]
    panel.plot(tokens, seconds, style, marker=".", label=label)
