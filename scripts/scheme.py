"""SVG that is readable on a light and on a dark page, one file for both.

An SVG picture knows the colour scheme of the page that shows it, be it chosen by the system or by a
switch of the page (``prefers-color-scheme`` within the picture). Programs that know no such rules
show the light colours.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from poetmodel.report.pictures import RAM_KIND_COLOURS

if TYPE_CHECKING:
    from collections.abc import Mapping

PAPER: Final = "#1e2129"
INK: Final = "#e2e4e9"
DARK: Final[Mapping[str, str]] = MappingProxyType(
    {
        "#ffffff": PAPER,
        "#000000": INK,
        # greys: lines, grids, frames of legends
        "#262626": INK,
        "#555555": "#b4b9c4",
        "#808080": "#9aa0ad",
        "#b0b0b0": "#464c59",
        "#bbbbbb": "#5a606d",
        "#cccccc": "#464c59",
        "#dddddd": "#3a404c",
        # Okabe and Ito, as in reports
        "#0072b2": "#56a8e0",
        "#c6dcec": "#35506a",
        "#cc79a7": "#d98fb8",
        "#b00020": "#ff6b7f",
        # kinds of tensors, as in reports
        **{light.lower(): dark.lower() for light, dark in RAM_KIND_COLOURS},
        # reds and blues of measurements
        "#b2182b": "#f2727d",
        "#2166ac": "#6cabe8",
        # matplotlib's cycle
        "#1f77b4": "#5ba7de",
        "#d62728": "#f26b67",
        "#9467bd": "#b99adb",
        "#8c564b": "#c29287",
        "#7f7f7f": "#a5a5a5",
    }
)
"""Colours that a dark page needs otherwise, by the colour on a light page."""


def following_scheme(svg: str) -> str:
    """Return an SVG picture with rules for its colours on a dark page.

    Parameters
    ----------
    svg : str
        A picture as matplotlib writes it: colours in ``style`` attributes, six digits each, and
        text as text.
    """
    rules = [
        f'[style*="{part}: {light}"]{{{part}:{dark}!important}}'
        for light, dark in DARK.items()
        for part in ("fill", "stroke")
        if f"{part}: {light}" in svg
    ]
    style = f"text{{fill:{INK}}}" + "".join(rules)
    block = f"<style>@media (prefers-color-scheme:dark){{{style}}}</style>"
    return re.sub(r"(<svg\b[^>]*>)", lambda head: f"{head[1]}\n {block}", svg, count=1)
