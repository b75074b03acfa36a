"""Sample functions and modules for readers who judge names and docstrings without the code.

``python scripts/sample_functions.py`` prints 60 functions of ``src/`` that have at least eight
lines: path, signature and docstring, without the body. A reader writes down the effect of each
function, and then compares with the bodies, which ``--bodies`` prints in the same order.
``--modules N`` prints N module paths instead, ``--words`` counts vague words in all docstrings.
Equal seeds give equal samples as long as no function is added, removed or renamed.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).resolve().parents[1]
MIN_LINES: Final = 8
VAGUE: Final = re.compile(
    r"\b(what|nobody|nothing|others|told|so many|so much|as far as)\b", re.IGNORECASE
)
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Function:
    """A function of the package: its path, and its source without and with the body."""

    path: str
    name: str
    """Name, of a method with its class."""
    head: str
    """Decorators, signature and docstring; of a constructor, before it that of the class."""
    source: str


def parsed_modules() -> Iterator[tuple[Path, str, ast.Module]]:
    """Yield path, text and syntax tree of each module of ``src/``, in the order of paths."""
    for path in sorted((ROOT / "src").rglob("*.py")):
        text = path.read_text("utf-8")
        yield path, text, ast.parse(text)


def functions() -> Iterator[Function]:
    """Yield the functions and methods of ``src/`` that have at least ``MIN_LINES`` lines."""
    for path, text, tree in parsed_modules():
        lines = text.splitlines()
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        class_of = {id(node): each for each in classes for node in each.body}
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if node.end_lineno is None or node.end_lineno - node.lineno + 1 < MIN_LINES:
                continue
            has_docstring = ast.get_docstring(node) is not None
            first = node.body[0]
            last = (first.end_lineno or first.lineno) if has_docstring else first.lineno - 1
            start = min([node.lineno, *(each.lineno for each in node.decorator_list)])
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
    for _, _, tree in parsed_modules():
        for node in ast.walk(tree):
            if isinstance(node, Documented):
                docstring = ast.get_docstring(node) or ""
                counts.update(found.lower() for found in VAGUE.findall(docstring))
    return counts


def main() -> int:
    """Print a sample of functions or modules, or the counts of vague words."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=60, help="functions in the sample")
    parser.add_argument("--bodies", action="store_true", help="print the bodies, too")
    parser.add_argument("--modules", type=int, metavar="N", help="print N paths of modules")
    parser.add_argument("--words", action="store_true", help="count vague words in docstrings")
    args = parser.parse_args()
    generator = random.Random(args.seed)  # noqa: S311 (no secret)
    if args.words:
        lines = [f"{word} {count}" for word, count in count_vague_words().most_common()]
    elif args.modules:
        paths = [str(path.relative_to(ROOT)) for path, _, _ in parsed_modules()]
        lines = sorted(generator.sample(paths, min(args.modules, len(paths))))
    else:
        found = list(functions())
        sample = generator.sample(found, min(args.count, len(found)))
        lines = [
            f"{number}. {each.path}: {each.name}\n{each.source if args.bodies else each.head}\n"
            for number, each in enumerate(sample, 1)
        ]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
