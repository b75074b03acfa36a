"""Sample functions and modules for readers who judge names and docstrings without the code.

``python scripts/sample_functions.py`` prints 60 functions of ``src/`` that have at least eight
lines: path, signature and docstring, without the body. A reader writes down the effect of each
function, and then compares with the bodies, which ``--bodies`` prints in the same order.
``--modules N`` prints N module paths instead, ``--words`` counts vague words in all docstrings.
Equal seeds give equal samples while the list of functions or modules stays the same.
"""

from __future__ import annotations

import argparse
import ast
import gc
import random
import re
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).resolve().parents[1]
MIN_LINES: Final = 8
VAGUE_WORD: Final = re.compile(
    r"\b(what|nobody|nothing|others|told|so many|so much|as far as)\b", re.IGNORECASE
)
DocumentedNode = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Function:
    """A function of the package: its path, and its source without and with the body."""

    path: str
    """Path of its module in the repository."""
    name: str
    """Name; a method's is preceded by its class."""
    head: str
    """Decorators, signature and docstring.

    A constructor's is preceded by the name of its class and the first line of the class docstring.
    """
    source: str
    """Decorators, signature, docstring and body."""


@cache
def parse_modules() -> list[tuple[Path, str, ast.Module]]:
    """Return path, source text and syntax tree of each module of ``src/``, sorted by path."""
    paths = sorted((ROOT / "src").rglob("*.py"))
    collecting = gc.isenabled()
    gc.disable()  # it would look at all trees again and again, now and later
    try:
        texts = [(path, path.read_text("utf-8")) for path in paths]
        return [(path, text, ast.parse(text)) for path, text in texts]
    finally:
        gc.freeze()
        if collecting:
            gc.enable()


def substatements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what holds statements directly inside a node: statements, handlers and cases."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield child


def find_statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node, and all statements inside of it, without expressions."""
    yield node
    for child in substatements(node):
        yield from find_statements(child)


def find_functions() -> Iterator[Function]:
    """Yield the functions and methods of ``src/`` that have at least ``MIN_LINES`` lines."""
    for path, text, tree in parse_modules():
        lines = text.splitlines()
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        class_of = {id(node): owner for owner in classes for node in owner.body}
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if node.end_lineno is None or node.end_lineno - node.lineno + 1 < MIN_LINES:
                continue
            has_docstring = ast.get_docstring(node) is not None
            first = node.body[0]
            last = (first.end_lineno or first.lineno) if has_docstring else first.lineno - 1
            start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            owner = class_of.get(id(node))
            head = lines[start - 1 : last]
            if owner is not None and node.name == "__init__":
                summary = (ast.get_docstring(owner) or "").partition("\n")[0]
                head.insert(0, f'class {owner.name}:\n    """{summary}"""\n')
            yield Function(
                str(path.relative_to(ROOT)),
                node.name if owner is None else f"{owner.name}.{node.name}",
                "\n".join(head),
                "\n".join(lines[start - 1 : node.end_lineno]),
            )


def count_vague_words() -> Counter[str]:
    """Return the number of uses of each vague word in the docstrings of ``src/``."""
    counts: Counter[str] = Counter()
    for _, _, tree in parse_modules():
        for node in find_statements(tree):
            if isinstance(node, DocumentedNode):
                docstring = ast.get_docstring(node) or ""
                counts.update(word.lower() for word in VAGUE_WORD.findall(docstring))
    return counts


def main() -> int:
    """Print a sample of functions or modules, or the counts of vague words; return 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=60, help="functions in the sample")
    parser.add_argument("--bodies", action="store_true", help="print the bodies, too")
    parser.add_argument("--modules", type=int, metavar="N", help="print N paths of modules")
    parser.add_argument("--words", action="store_true", help="count vague words in docstrings")
    options = parser.parse_args()
    generator = random.Random(options.seed)  # noqa: S311 (no secret)
    if options.words:
        lines = [f"{word} {count}" for word, count in count_vague_words().most_common()]
    elif options.modules:
        paths = [str(path.relative_to(ROOT)) for path, _, _ in parse_modules()]
        lines = sorted(generator.sample(paths, min(options.modules, len(paths))))
    else:
        candidates = list(find_functions())
        sample = generator.sample(candidates, min(options.count, len(candidates)))
        lines = [
            f"{number}. {function.path}: {function.name}\n"
            f"{function.source if options.bodies else function.head}\n"
            for number, function in enumerate(sample, 1)
        ]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
