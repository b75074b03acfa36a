"""The templates in ``c``, from which files of exported folders are made, and their syntax.

``@WORD@`` is replaced by the value of a word. ``@IF WORD@ ... @END WORD@`` retains the enclosed
text if the value is true, ``@UNLESS WORD@ ... @END WORD@`` if it is false. A mark of a block that
fills its line is removed with the line break.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, TypeAlias

from poetmodel.lowered.kernels import SOURCES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from importlib.resources.abc import Traversable

TemplateValues: TypeAlias = "Mapping[str, str | int]"
"""Values by template word. True and False are written as 1 and 0."""

_WORD_PATTERN: Final = re.compile(r"@([A-Z_]+)@")
_BLOCK_PATTERN: Final = re.compile(
    r"(^)?@(IF|UNLESS) ([A-Z_]+)@(?(1)\n)(.*?)(^)?@END \3@(?(5)\n)", re.MULTILINE | re.DOTALL
)


def read_template(name: str) -> str:
    """Read a template by its path relative to ``c``."""
    return (SOURCES / name).read_text(encoding="utf-8")


def fill_template(text: str, values: TemplateValues) -> str:
    """Return a template with words replaced by `values`, without blocks that are false."""
    resolved = _resolve_blocks(text, values)
    return _WORD_PATTERN.sub(lambda match: _format_value(values[match[1]]), resolved)


def _resolve_blocks(text: str, values: TemplateValues) -> str:
    """Return a text without marks of blocks, nested too, and blocks whose condition is false."""

    def replace_block(match: re.Match[str]) -> str:
        is_true = bool(values[match[3]]) == (match[2] == "IF")
        return _resolve_blocks(match[4], values) if is_true else ""

    return _BLOCK_PATTERN.sub(replace_block, text)


def _format_value(value: str | int) -> str:
    return value if isinstance(value, str) else str(int(value))


def list_templates() -> Iterator[tuple[str, str]]:
    """Yield (path, text) of all templates of exported folders; a folder needs some of them."""
    yield from list_template_files(SOURCES)
    yield from list_template_files(SOURCES / "generated")


def list_template_files(folder: Traversable, parent: str = "") -> Iterator[tuple[str, str]]:
    """Yield (`parent` + path, text) of files in a folder; not in generated, kernels and shared."""
    for path in folder.iterdir():
        name = f"{parent}{path.name}"
        if path.is_file():
            yield name, path.read_text(encoding="utf-8")
        elif name not in {"generated", "kernels", "shared"}:
            yield from list_template_files(path, f"{name}/")
