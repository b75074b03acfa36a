"""Charts of the pages of results, as SVG by matplotlib.

A file carries a digest of what it shows, so that checking it needs no plotting library.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from poetmodel.files import write_text
from poetmodel.report.scheme import following_scheme

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WIDTH_INCHES: Final = 7.2
"""As wide as the text of the site, so that words in charts are nearly as large as beside them."""
BLUE, RED, GREEN, ORANGE, PURPLE = "#0072b2", "#b2182b", "#009e73", "#e69f00", "#cc79a7"
GREY, PALE = "#808080", "#cccccc"
COLOURS: Final = (BLUE, ORANGE, GREEN, PURPLE, RED, "#56b4e9", GREY)
"""Colours of lines, in turn."""
_LONG_NUMBER: Final = re.compile(r"(\.\d\d)\d+")
"""Places of numbers beyond a hundredth of a point, which nobody sees."""
_TAG: Final = re.compile(r"<[^>]+>")
"""A tag with its attributes: coordinates are there, and what is between tags is text."""
_STYLE: Final[Any] = MappingProxyType(
    {
        "axes.axisbelow": True,
        "axes.grid": True,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlelocation": "left",
        "axes.titlesize": 9,
        "axes.titleweight": "bold",
        "font.size": 9,
        "grid.color": "#dddddd",
        "grid.linewidth": 0.6,
        "legend.frameon": False,
        "svg.fonttype": "none",
        "svg.hashsalt": "poetmodel",
    }
)


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A picture of a page."""

    shown: Any
    """All that it shows, as JSON values; nothing to show if empty."""
    paint: Callable[[Any, Any], None]
    """Draws what is shown into a figure of matplotlib."""
    height_inches: float = 3.2

    @cached_property
    def digest(self) -> str:
        """What identifies the content."""
        text = json.dumps([self.paint.__name__, self.shown])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def current(self, path: Path) -> bool:
        """Return whether a file shows this."""
        return path.is_file() and f"data {self.digest}" in path.read_text(encoding="utf-8")

    def write(self, path: Path) -> None:
        """Draw into a file; the same chart gives the same bytes."""
        import matplotlib as mpl
        from matplotlib.figure import Figure

        with mpl.rc_context(dict(_STYLE)):
            figure = Figure(figsize=(WIDTH_INCHES, self.height_inches), layout="constrained")
            self.paint(figure, self.shown)
            content = io.BytesIO()
            metadata = {"Date": None, "Description": f"data {self.digest}"}
            figure.savefig(content, format="svg", metadata=metadata)
        whole = content.getvalue().decode()
        drawn = _TAG.sub(lambda tag: _LONG_NUMBER.sub(r"\1", tag[0]), whole)
        write_text(path, following_scheme(drawn))
