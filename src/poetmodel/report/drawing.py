"""From a picture's description to a file: PNG and SVG by matplotlib, HTML by plotly."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from poetmodel.data import write_bytes
from poetmodel.errors import InputError, MissingExtraError, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from poetmodel.report.pictures import AddressMap, Grid, Timeline

LIBRARIES: Final[Mapping[str, str]] = {
    ".png": "matplotlib",
    ".svg": "matplotlib",
    ".html": "plotly",
}
"""What draws a picture, by the ending of its file."""


def check_picture(path: str | Path, libraries: Mapping[str, str] = LIBRARIES) -> None:
    """Raise unless a picture of this name can be drawn; nothing is written."""
    suffix = Path(path).suffix.lower()
    if suffix not in libraries:
        raise InputError(
            f"{path}: expected a name that ends in {', '.join(libraries)}, got {shown(suffix)}"
        )
    check_installed(path, f"drawing {suffix[1:]}", libraries[suffix])


def check_installed(path: str | Path, what: str, *libraries: str) -> None:
    """Raise unless libraries are installed, all of the extra ``report``; nothing is imported."""
    missing = [name for name in libraries if find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"{path}: {what} needs {' and '.join(missing)}, not installed here; "
            f'pip install "poetmodel[report]" installs {"it" if len(missing) == 1 else "them"}'
        )


def draw(picture: Timeline | Grid | AddressMap, path: str | Path) -> None:
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
