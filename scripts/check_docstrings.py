"""Check the length of docstrings in ``src/``: ``python scripts/check_docstrings.py``.

Private names (with an underscore, or inside of a function or a private class) have at most
`MAX_LINES` lines of text and state no exceptions; docstrings with a literal block (``::``), such as
the inequalities that the documentation quotes, may be longer. A constructor has no docstring beside
that of its class. Prints one line for each violation; the exit status is 1 if there are any.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).resolve().parents[1]
MAX_LINES: Final = 4
_RAISES: Final = re.compile(r"(?m)^\s*Raises$|\bRaises `")
_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)


def find_violations(
    tree: ast.AST, class_name: str = "", *, is_private: bool = False
) -> Iterator[tuple[int, str]]:
    """Yield (line, message) for each docstring that breaks a rule.

    `class_name` is that of `tree`, if `tree` is a class with a docstring.
    """
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            yield from find_violations(node, is_private=is_private)
            continue
        is_inner_private = is_private or re.match(r"_(?!_)", node.name) is not None
        text = ast.get_docstring(node) or ""
        if text and node.name == "__init__" and class_name:
            yield node.lineno, f"{class_name}.__init__ repeats the docstring of its class"
        elif is_inner_private:
            n_lines = sum(bool(line.strip()) for line in text.splitlines())
            if n_lines > MAX_LINES and "::\n" not in text:
                yield node.lineno, f"{node.name} has {n_lines} lines of text; allowed: {MAX_LINES}"
            if _RAISES.search(text):
                yield node.lineno, f"{node.name} states exceptions, which only public names do"
        yield from find_violations(
            node,
            node.name if text and isinstance(node, ast.ClassDef) else "",
            is_private=is_inner_private or isinstance(node, _FUNCTIONS),
        )


def main() -> int:
    """Print all violations; return the exit status."""
    status = 0
    for path in sorted((ROOT / "src").rglob("*.py")):
        for line, message in find_violations(ast.parse(path.read_text("utf-8"))):
            print(f"{path.relative_to(ROOT)}:{line}: {message}")  # noqa: T201
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
