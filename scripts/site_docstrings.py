"""How docstrings become Markdown in the site: an extension of griffe, named in ``mkdocs.yml``."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any, Final

griffe: Any = import_module("griffe")  # comes with the extra `docs`; elsewhere it has no types

_COLONS: Final = re.compile(r"(?<=\S)::$", re.MULTILINE)
_CHOICE: Final = re.compile(r"^( *\w+ : )\{(.+)\}", re.MULTILINE)


class Docstrings(griffe.Extension):  # type: ignore[misc]
    """Docstrings lose what Markdown does not read.

    That is the second colon before a literal block, and the braces around choices: griffe takes the
    first choice for the default, whatever the signature says.
    """

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            text = _COLONS.sub(":", obj.docstring.value)
            obj.docstring.value = _CHOICE.sub(r"\1\2", text)
