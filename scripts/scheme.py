"""Style rules that make one SVG file readable on light and on dark pages.

In a picture, ``prefers-color-scheme`` follows the scheme of the page, which the system or a switch
of the page chooses. Programs without support for media queries show the light colours.
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
DARK_COLOURS: Final[Mapping[str, str]] = MappingProxyType(
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
"""Colours on a dark page, by the colour on a light page; other colours stay."""


def add_dark_colours(svg: str) -> str:
    """Return an SVG picture with a style element that replaces its colours on a dark page.

    Fills and strokes change by `DARK_COLOURS`; all text becomes `INK`.

    Parameters
    ----------
    svg : str
        A picture as matplotlib writes it: colours as six hexadecimal digits in ``rule_text``
        attributes, and text in ``text`` elements rather than as paths.
    """
    rules = [
        f'[style*="{attribute}: {light}"]{{{attribute}:{dark}!important}}'
        for light, dark in DARK_COLOURS.items()
        for attribute in ("fill", "stroke")
        if f"{attribute}: {light}" in svg
    ]
    rule_text = f"text{{fill:{INK}}}" + "".join(rules)
    style_element = f"<style>@media (prefers-color-scheme:dark){{{rule_text}}}</style>"
    return re.sub(r"(<svg\b[^>]*>)", lambda tag: f"{tag[1]}\n {style_element}", svg, count=1)
