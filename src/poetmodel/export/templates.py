"""The mechanism of the templates in ``export/c``, which all files of an exported folder are.

``@WORD@`` becomes the value of a word. ``@IF WORD@ ... @END WORD@`` keeps the text between its
marks if the value is true, ``@UNLESS WORD@ ... @END WORD@`` if it is not. A mark that fills a line
takes that line with it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, TypeAlias

from poetmodel.lowered.kernels import SOURCES

if TYPE_CHECKING:
    from collections.abc import Mapping

Words: TypeAlias = "Mapping[str, str | int]"
"""Values by word. True and False are written as 1 and 0."""

_WORD: Final = re.compile(r"@([A-Z_]+)@")
_BLOCK: Final = re.compile(
    r"(^)?@(IF|UNLESS) ([A-Z_]+)@(?(1)\n)(.*?)(^)?@END \3@(?(5)\n)", re.MULTILINE | re.DOTALL
)


def read_template(name: str) -> str:
    """Read a template, by its path below ``export/c``."""
    return (SOURCES / name).read_text(encoding="utf-8")


def fill_template(text: str, words: Words) -> str:
    """Replace the words of a template, and drop the blocks whose condition does not hold.

    Raises
    ------
    KeyError
        If a word is unknown.
    """
    kept = _drop_blocks(text, words)
    return _WORD.sub(lambda match: _format_value(words[match[1]]), kept)


def _drop_blocks(text: str, words: Words) -> str:
    """Remove the marks of blocks, and the text of those whose condition does not hold."""

    def replace_block(match: re.Match[str]) -> str:
        holds = bool(words[match[3]]) == (match[2] == "IF")
        return _drop_blocks(match[4], words) if holds else ""

    return _BLOCK.sub(replace_block, text)


def _format_value(value: str | int) -> str:
    return value if isinstance(value, str) else str(int(value))
