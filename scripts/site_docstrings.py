"""Extension of griffe that adapts docstrings to the site's Markdown, named in ``mkdocs.yml``."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any, Final

griffe: Any = import_module("griffe")  # of the extra `docs`; untyped for checks without it

_COLONS: Final = re.compile(r"(?<=\S)::$", re.MULTILINE)
_CHOICE: Final = re.compile(r"^( *\w+ : )\{(.+)\}", re.MULTILINE)


class Docstrings(griffe.Extension):  # type: ignore[misc]
    """Removes the second colon before a literal block, and the braces around choices.

    Markdown would show the colon. griffe would take the first choice in braces for the default,
    even if the signature has another one.
    """

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute in place, if any."""
        if obj.docstring is not None:
            text = _COLONS.sub(":", obj.docstring.value)
            obj.docstring.value = _CHOICE.sub(r"\1\2", text)
