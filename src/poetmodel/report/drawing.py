"""From a picture's description to a file: PNG and SVG by matplotlib, HTML by plotly."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from poetmodel.data import write_bytes
from poetmodel.errors import InputError, MissingExtraError, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from poetmodel.report.pictures import Grid, Timeline

LIBRARIES: Final[Mapping[str, str]] = {
    ".png": "matplotlib",
    ".svg": "matplotlib",
    ".html": "plotly",
}
"""What draws a picture, by the ending of its file."""


def check_picture(path: str | Path) -> None:
    """Raise unless a picture of this name can be drawn; nothing is written."""
    suffix = Path(path).suffix.lower()
    if suffix not in LIBRARIES:
        raise InputError(
            f"{path}: expected a name that ends with {', '.join(LIBRARIES)}, got {shown(suffix)}"
        )
    library = LIBRARIES[suffix]
    if find_spec(library) is None:
        raise MissingExtraError(
            f"{path}: drawing {suffix[1:]} needs {library}, which is not installed; "
            'pip install "poetmodel[report]" installs it'
        )


def draw(picture: Timeline | Grid, path: str | Path) -> None:
    """Draw a picture into a file; its ending, .png, .svg or .html, says how.

    HTML is one file that needs no network and names what one points at.
    """
    check_picture(path)
    suffix = Path(path).suffix.lower()
    if suffix == ".html":
        from poetmodel.report.interactive import page

        content = page(picture).encode("utf-8", "replace")
    else:
        from poetmodel.report.still import image

        content = image(picture, suffix[1:])
    write_bytes(path, content)
