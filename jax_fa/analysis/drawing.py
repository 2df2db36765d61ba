"""The style of pictures, for the programs that draw what they print.

Needs matplotlib, which nothing else does: ``obstacle`` says what to install. Pictures have a light
ground of their own, so that they can be read on light and dark pages, and colours that
colour-blind readers tell apart (after Okabe and Ito, "Color Universal Design", 2008, the light
ones darker, since names are written in them).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

COLORS = ("#0072B2", "#D55E00", "#008261", "#A8487F", "#8A6D00", "#6E7781")
INK, FAINT, RULE = "#1f2328", "#59636e", "#d8dee4"

_STYLE: dict[Any, Any] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 9.5,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "lines.linewidth": 1.6,
    "lines.markersize": 3.6,
    # The same picture is the same file.
    "svg.hashsalt": "jax_fa",
}
_LINE_INCHES = 0.15
"""Height of a line of labels."""


def obstacle() -> str | None:
    """The reason why nothing can be drawn, and what to install; None if matplotlib is there."""
    if importlib.util.find_spec("matplotlib") is not None:
        return None
    return "drawing needs matplotlib, which is not installed: pip install matplotlib"


@contextmanager
def picture(
    path: Path, size: tuple[float, float], title: str, source: str = "", identifier: str = ""
) -> Iterator[Any]:
    """A matplotlib figure to draw into; written to ``path`` at the end of the block.

    Args:
        path: of the file; its suffix says which kind.
        size: width and height in inches.
        title: what is to be seen.
        source: conditions under the picture: of what, with what, when.
        identifier: of what is drawn; an SVG holds it.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        figure.suptitle(title, x=0.012, ha="left", fontsize=11, fontweight="bold")
        yield figure
        if source:
            figure.supxlabel(source, x=0.012, ha="left", fontsize=8, color=FAINT)
        about = {"Date": None, "Identifier": identifier} if path.suffix == ".svg" else None
        figure.savefig(path, dpi=144, metadata=about)


def logarithmic(axis: Any) -> None:
    """Gives an axis with a logarithmic scale ticks in plain numbers: 1, 2, 5, 10, or 1, 10, 100."""
    from matplotlib.ticker import LogLocator, NullLocator

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")


class End(NamedTuple):
    """The end of a line, and its label.

    Attributes:
        value: its last y.
        text: its name.
        color: of the line.
    """

    value: float
    text: str
    color: str


def label_ends(axes: Any, ends: Iterable[End], height_inches: float) -> None:
    """Writes the names of lines right of the axes, each at its end or as near as there is room.

    What is drawn later must not change the limits; ``height_inches`` is the height of the axes, or
    about that.
    """
    axes.get_ylim()  # lets the axes settle their limits, on which transData depends
    below = [
        (axes.transAxes.inverted().transform(axes.transData.transform((1, end.value)))[1], end)
        for end in sorted(ends)
    ]
    heights = _apart([height for height, _ in below], _LINE_INCHES / height_inches)
    for height, (_, end) in zip(heights, below, strict=True):
        axes.text(1.03, height, end.text, color=end.color, va="center", transform=axes.transAxes)


def _apart(heights: Sequence[float], gap: float) -> list[float]:
    """Ascending heights, moved as little as keeps them ``gap`` apart: clusters about their mean."""
    clusters: list[list[float]] = []
    for height in heights:
        clusters.append([height])
        while len(clusters) > 1 and _edge(clusters[-1], -gap) < _edge(clusters[-2], gap) + gap:
            clusters[-2:] = [clusters[-2] + clusters[-1]]
    return [
        _edge(cluster, -gap) + gap * place for cluster in clusters for place in range(len(cluster))
    ]


def _edge(cluster: Sequence[float], gap: float) -> float:
    """The lowest place of a cluster about its mean if ``gap`` is negative, else the highest."""
    return sum(cluster) / len(cluster) + gap * (len(cluster) - 1) / 2
