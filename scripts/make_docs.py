"""Put what components and methods say of themselves into the pages.

``docs/concepts/formulations.md`` lists the components of each formulation, and the site's reference
has them in full; ``docs/baselines.md`` has the methods of earlier work,
``docs/reference/cli.md`` the back ends, ``docs/guides/import.md`` the operators of ONNX that are
refused (written where PyTorch and onnx are installed). ``python scripts/make_docs.py`` rewrites
the generated blocks; ``--check`` writes nothing and exits 1 if a page is not current.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from blocks import main_of, replace_block, table
from poetmodel.backends.registry import backend_class, backend_names
from poetmodel.baselines import METHODS
from poetmodel.model.aggregated import LAZY
from poetmodel.model.compact import COMPACT
from poetmodel.model.paper import PAPER
from poetmodel.model.unreduced import UNREDUCED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poetmodel.backends import Capabilities
    from poetmodel.baselines import Method
    from poetmodel.model import Component, Formulation

DOCS: Final = Path(__file__).resolve().parents[1] / "docs"
PAGE: Final = DOCS / "concepts" / "formulations.md"
"""The page with the components of all formulations."""

METHODS_PAGE: Final = DOCS / "baselines.md"
"""The page with the table of methods."""

COMMANDS_PAGE: Final = DOCS / "reference" / "cli.md"
"""The page with the table of back ends."""

IMPORT_PAGE: Final = DOCS / "guides" / "import.md"
"""The page with what is refused of ONNX."""

FORMULATIONS: Final = (COMPACT, LAZY, UNREDUCED, PAPER)
"""In the order of the page."""

_LITERAL: Final = re.compile(r"^(?P<lead>.*)::\n\n(?P<code>(?:    .*\n|\n)*    .*)", re.MULTILINE)


def markdown(statement: str) -> str:
    """Return a builder's docstring as Markdown: literal blocks become code blocks."""

    def fence(found: re.Match[str]) -> str:
        lead = found["lead"].strip()
        code = textwrap.dedent(found["code"])
        return f"{lead}:\n\n```text\n{code}\n```" if lead else f"```text\n{code}\n```"

    return _LITERAL.sub(fence, inspect.cleandoc(statement))


def components() -> str:
    """Return every component of every formulation as Markdown, each where it comes first."""
    parts = []
    listed: set[Component] = set()
    for formulation in FORMULATIONS:
        parts.append(f"### Components of `{formulation.name}`")
        for component in formulation.components:
            if component not in listed:
                parts.append(f"#### {formulation.name}: {component.name}")
                parts.append(markdown(component.statement))
                parts.append(f"Source: {component.source}.")
        shared = [f"`{part.name}`" for part in formulation.components if part in listed]
        if shared:
            parts.append(f"As above: {', '.join(shared)}.")
        listed.update(formulation.components)
    return "\n\n".join(parts)


def page(text: str) -> str:
    """Return the page with its block current: the names of components, by formulation."""
    return replace_block(text, "components", "\n".join(map(_component_line, FORMULATIONS)))


def _component_line(formulation: Formulation) -> str:
    names = ", ".join(f"`{component.name}`" for component in formulation.components)
    return f"- `{formulation.name}`: {names}"


_COLUMNS: Final = {
    "general graphs": "general_graphs",
    "compute": "compute_aware",
    "memory": "memory_aware",
    "power": "power_aware",
    "recomputes": "recomputes",
    "pages": "pages",
    "state": "state_homes",
}
"""Heads of the table of methods, and the attribute of each."""


def methods_page(text: str) -> str:
    """Return the page of methods with its blocks current."""
    rows = [
        (f"`{entry.name}`", *(_word(getattr(entry, name)) for name in _COLUMNS.values()))
        for entry in METHODS.values()
    ]
    heads = ("method", *_COLUMNS)
    text = replace_block(text, "table", table(heads, rows))
    return replace_block(text, "methods", "\n\n".join(map(_method_entry, METHODS.values())))


def backends_page(text: str) -> str:
    """Return the page of commands with what the built-in back ends declare."""
    rows = [
        (f"`{name}`", kind.display_name, f"`{kind.remedy}`", *_abilities(kind.capabilities))
        for name in backend_names()
        for kind in (backend_class(name),)
    ]
    heads = (
        "back end",
        "solver",
        "install with",
        "start values",
        "callbacks",
        "threads",
        "licence",
    )
    return replace_block(text, "backends", table(heads, rows))


def _abilities(able: Capabilities) -> tuple[str, ...]:
    size = able.licence_free_size
    licence = "" if size is None else f"its own allows {size:,} variables and {size:,} rows"
    return (_word(able.starts), _word(able.callbacks), _word(able.threads), licence)


def import_page(text: str) -> str:
    """Return the page of imports with what is refused of ONNX, of the opsets that are read."""
    from onnx import defs

    from poetmodel.torch.onnx.module import KNOWN_OPERATORS
    from poetmodel.torch.onnx.operators import OPERATORS
    from poetmodel.torch.onnx.reading import OPSETS

    newest: dict[str, Any] = {}
    for schema in sorted(defs.get_all_schemas_with_history(), key=lambda s: s.since_version):
        if not schema.domain and schema.since_version <= OPSETS[1]:
            newest[schema.name] = schema
    unknown = [
        name for name, s in newest.items() if not s.deprecated and name not in KNOWN_OPERATORS
    ]
    rows = []
    for name, known in sorted(OPERATORS.items()):
        further = "outputs after the first" if known.first_output_only else ""
        if known.unsupported_features or further:
            rows.append(
                (f"`{name}`", "; ".join(filter(None, (known.unsupported_features, further))))
            )
    names = ", ".join(f"`{name}`" for name in sorted(unknown))
    content = f"{table(('operator', 'refused'), rows)}\n\nNot known: {names}."
    return replace_block(text, "onnx", content)


def _word(value: object) -> str:
    return ("yes" if value else "") if isinstance(value, bool) else str(value)


def _method_entry(entry: Method) -> str:
    names = ", ".join(f"`{entry.name}:{variant}`" for variant in entry.variants)
    parts = (
        f"**`{entry.name}`** — {entry.summary}.",
        f"*Source:* {entry.source}.",
        f"*Assumes:* {entry.assumptions}.",
        f"*Not for:* {entry.not_for}" if entry.not_for else "",
        f"*Variants:* {names}." if names else "",
    )
    return "\\\n".join(part for part in parts if part)


def main(arguments: Sequence[str] | None = None) -> int:
    """Make or check the pages; return the exit status."""
    pages = {PAGE: page, METHODS_PAGE: methods_page, COMMANDS_PAGE: backends_page}
    if find_spec("torch") and find_spec("onnx"):
        pages[IMPORT_PAGE] = import_page

    def current() -> dict[Path, str]:
        return {path: make(path.read_text(encoding="utf-8")) for path, make in pages.items()}

    return main_of(current, arguments)


if __name__ == "__main__":
    sys.exit(main())
