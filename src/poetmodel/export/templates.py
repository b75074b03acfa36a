"""The template syntax of ``export/c``, from which all files of an exported folder are made.

``@WORD@`` is replaced by the value of a word. ``@IF WORD@ ... @END WORD@`` retains the enclosed
text if the value is true, ``@UNLESS WORD@ ... @END WORD@`` if it is false. A mark that fills a line
is removed with the line.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, TypeAlias

from poetmodel.lowered.kernels import SOURCES

if TYPE_CHECKING:
    from collections.abc import Mapping

Words: TypeAlias = "Mapping[str, str | int]"
"""Values by template word. True and False are written as 1 and 0."""

_WORD: Final = re.compile(r"@([A-Z_]+)@")
_BLOCK: Final = re.compile(
    r"(^)?@(IF|UNLESS) ([A-Z_]+)@(?(1)\n)(.*?)(^)?@END \3@(?(5)\n)", re.MULTILINE | re.DOTALL
)


def read_template(name: str) -> str:
    """Read a template by its path relative to ``export/c``."""
    return (SOURCES / name).read_text(encoding="utf-8")


def fill_template(text: str, words: Words) -> str:
    """Replace the words of a template, and remove the blocks whose condition is false.

    Raises
    ------
    KeyError
        If a word is unknown.
    """
    resolved = _resolve_blocks(text, words)
    return _WORD.sub(lambda match: _format_value(words[match[1]]), resolved)


def _resolve_blocks(text: str, words: Words) -> str:
    """Remove the marks of all blocks, and the text of blocks whose condition is false."""

    def replace_block(match: re.Match[str]) -> str:
        is_true = bool(words[match[3]]) == (match[2] == "IF")
        return _resolve_blocks(match[4], words) if is_true else ""

    return _BLOCK.sub(replace_block, text)


def _format_value(value: str | int) -> str:
    return value if isinstance(value, str) else str(int(value))
