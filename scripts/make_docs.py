"""Generate the blocks of pages that describe components, methods, back ends and ONNX operators.

``docs/concepts/formulations.md`` lists the components of each formulation, and the site's reference
describes them (`format_components`); ``docs/baselines.md`` lists the methods of earlier work,
``docs/reference/cli.md`` the back ends, ``docs/architecture.md`` the files of a change (of
``docs/changes.toml``), ``docs/guides/import.md`` the unsupported operators of ONNX (only if PyTorch
and onnx are installed). ``python scripts/make_docs.py`` rewrites the generated
blocks; ``--check`` writes nothing and exits 1 if a page is not current.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from blocks import format_table, replace_block, run_page_script
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
FORMULATIONS_PAGE: Final = DOCS / "concepts" / "formulations.md"
"""The page with the components of all formulations."""

METHODS_PAGE: Final = DOCS / "baselines.md"
"""The page with the table of methods."""

COMMANDS_PAGE: Final = DOCS / "reference" / "cli.md"
"""The page with the table of back ends."""

ARCHITECTURE_PAGE: Final = DOCS / "architecture.md"
"""The page with the files of each change."""
CHANGES_FILE: Final = DOCS / "changes.toml"
"""The files and names of each change."""

IMPORT_PAGE: Final = DOCS / "guides" / "import.md"
"""The page with the unsupported operators of ONNX."""

FORMULATIONS: Final = (COMPACT, LAZY, UNREDUCED, PAPER)
"""All formulations, in the order of the page."""

_LITERAL: Final = re.compile(r"^(?P<lead>.*)::\n\n(?P<code>(?:    .*\n|\n)*    .*)", re.MULTILINE)


def convert_docstring(statement: str) -> str:
    """Return a builder's docstring as Markdown: literal blocks become code blocks."""

    def fence(match: re.Match[str]) -> str:
        lead = match["lead"].strip()
        code = textwrap.dedent(match["code"])
        return f"{lead}:\n\n```text\n{code}\n```" if lead else f"```text\n{code}\n```"

    return _LITERAL.sub(fence, inspect.cleandoc(statement))


def format_components() -> str:
    """Format the components of all formulations as Markdown.

    Each component is described at the first formulation that contains it. Later formulations list
    its name.
    """
    parts = []
    listed: set[Component] = set()
    for formulation in FORMULATIONS:
        parts.append(f"### Components of `{formulation.name}`")
        for component in formulation.components:
            if component not in listed:
                parts.append(f"#### {formulation.name}: {component.name}")
                parts.append(convert_docstring(component.statement))
                parts.append(f"Source: {component.source}.")
        shared = [f"`{part.name}`" for part in formulation.components if part in listed]
        if shared:
            parts.append(f"As above: {', '.join(shared)}.")
        listed.update(formulation.components)
    return "\n\n".join(parts)


def fill_formulations_page(text: str) -> str:
    """Return the text of `FORMULATIONS_PAGE` with the components of each formulation."""
    return replace_block(text, "components", "\n".join(map(_component_line, FORMULATIONS)))


def _component_line(formulation: Formulation) -> str:
    names = ", ".join(f"`{component.name}`" for component in formulation.components)
    return f"- `{formulation.name}`: {names}"


_METHOD_ATTRIBUTES: Final = {
    "general graphs": "general_graphs",
    "compute": "compute_aware",
    "memory": "memory_aware",
    "power": "power_aware",
    "recomputes": "recomputes",
    "pages": "pages",
    "state": "state_homes",
}
"""Attribute of a method for each column of the table of methods, by heading."""


def fill_methods_page(text: str) -> str:
    """Return the text of `METHODS_PAGE` with the current table and entries of methods."""
    rows = [
        (
            f"`{method.name}`",
            *(
                _format_value(getattr(method, attribute))
                for attribute in _METHOD_ATTRIBUTES.values()
            ),
        )
        for method in METHODS.values()
    ]
    headings = ("method", *_METHOD_ATTRIBUTES)
    text = replace_block(text, "table", format_table(headings, rows))
    return replace_block(text, "methods", "\n\n".join(map(_format_method, METHODS.values())))


def fill_backends_table(text: str) -> str:
    """Return the text of `COMMANDS_PAGE` with the current table of built-in back ends."""
    rows = [
        (
            f"`{name}`",
            backend.display_name,
            f"`{backend.remedy}`",
            *_capability_cells(backend.capabilities),
        )
        for name in backend_names()
        for backend in (backend_class(name),)
    ]
    headings = (
        "back end",
        "solver",
        "install with",
        "start values",
        "callbacks",
        "threads",
        "licence",
    )
    return replace_block(text, "backends", format_table(headings, rows))


def _capability_cells(capabilities: Capabilities) -> tuple[str, ...]:
    size = capabilities.licence_free_size
    licence = "" if size is None else f"its own allows {size:,} variables and {size:,} rows"
    return (
        _format_value(capabilities.starts),
        _format_value(capabilities.callbacks),
        _format_value(capabilities.threads),
        licence,
    )


def fill_import_page(text: str) -> str:
    """Return the text of `IMPORT_PAGE` with the current unsupported features and operators of ONNX.

    Of each operator of ONNX's own domain, the newest version within the supported opsets counts.
    Needs PyTorch and onnx.
    """
    from onnx import defs

    from poetmodel.torch.onnx.module import KNOWN_OPERATORS
    from poetmodel.torch.onnx.operators import OPERATORS
    from poetmodel.torch.onnx.reading import OPSETS

    newest: dict[str, Any] = {}
    for schema in sorted(
        defs.get_all_schemas_with_history(), key=lambda schema: schema.since_version
    ):
        if not schema.domain and schema.since_version <= OPSETS[1]:
            newest[schema.name] = schema
    unknown_names = [
        name
        for name, schema in newest.items()
        if not schema.deprecated and name not in KNOWN_OPERATORS
    ]
    rows = []
    for name, operator in sorted(OPERATORS.items()):
        further_refusal = "outputs after the first" if operator.first_output_only else ""
        if operator.unsupported_features or further_refusal:
            rows.append(
                (
                    f"`{name}`",
                    "; ".join(filter(None, (operator.unsupported_features, further_refusal))),
                )
            )
    names = ", ".join(f"`{name}`" for name in sorted(unknown_names))
    content = f"{format_table(('operator', 'refused'), rows)}\n\nNot known: {names}."
    return replace_block(text, "onnx", content)


def _format_value(value: object) -> str:
    return ("yes" if value else "") if isinstance(value, bool) else str(value)


def _format_method(method: Method) -> str:
    names = ", ".join(f"`{method.name}:{variant}`" for variant in method.variants)
    parts = (
        f"**`{method.name}`** — {method.summary}.",
        f"*Source:* {method.source}.",
        f"*Assumes:* {method.assumptions}.",
        f"*Not for:* {method.not_for}" if method.not_for else "",
        f"*Variants:* {names}." if names else "",
    )
    return "\\\n".join(part for part in parts if part)


def fill_changes_table(text: str) -> str:
    """Return the text of `ARCHITECTURE_PAGE` with the current table of `CHANGES_FILE`."""
    changes = tomllib.loads(CHANGES_FILE.read_text(encoding="utf-8"))["change"]
    rows = [
        (
            f"[{change['name']}](#{change['recipe']})" if "recipe" in change else change["name"],
            ", ".join(f"`{place}`" for place in change["places"]),
        )
        for change in changes
    ]
    return replace_block(text, "changes", format_table(("to change", "open"), rows))


def main(arguments: Sequence[str] | None = None) -> int:
    """Write stale pages, or only print their paths with ``--check``; return the exit status."""
    pages = {
        FORMULATIONS_PAGE: fill_formulations_page,
        METHODS_PAGE: fill_methods_page,
        COMMANDS_PAGE: fill_backends_table,
        ARCHITECTURE_PAGE: fill_changes_table,
    }
    if find_spec("torch") and find_spec("onnx"):
        pages[IMPORT_PAGE] = fill_import_page

    def render_pages() -> dict[Path, str]:
        return {path: fill(path.read_text(encoding="utf-8")) for path, fill in pages.items()}

    return run_page_script(render_pages, arguments)


if __name__ == "__main__":
    sys.exit(main())
