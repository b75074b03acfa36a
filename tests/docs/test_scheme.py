"""Pictures of pages follow the colour scheme of the page."""

import re

from scheme import DARK_COLOURS, INK, PAPER, add_dark_colours

LIGHT = """<?xml version="1.0"?>
<svg xmlns="http://www.w3.org/2000/svg" width="10">
 <rect style="fill: #ffffff; stroke: #b0b0b0"/><text>a</text>
</svg>"""


def _luminance(colour):
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_colours_of_dark_pages_are_rules_of_the_picture():
    """All paper and line colours of a picture have dark versions, and text is light there.

    Ink has a contrast of more than 7 to the paper, the strict limit of accessibility
    guidelines.
    """
    text = add_dark_colours(LIGHT)
    style = re.search(r"<style>@media \(prefers-color-scheme:dark\)(.*)</style>", text)
    assert f'[style*="fill: #ffffff"]{{fill:{PAPER}!important}}' in style[1]
    assert f'[style*="stroke: #b0b0b0"]{{stroke:{DARK_COLOURS["#b0b0b0"]}!important}}' in style[1]
    assert f"text{{fill:{INK}}}" in style[1]
    assert "#0072b2" not in style[1]
    assert text.replace(f"\n {style[0]}", "") == LIGHT
    assert (_luminance(INK) + 0.05) / (_luminance(PAPER) + 0.05) > 7
