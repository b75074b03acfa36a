"""Make the page of all commands and their options from the code of the command line.

``python scripts/make_commands.py`` writes ``docs/reference/commands.md``; ``--check`` writes
nothing and exits 1 where the page is not current.
"""

from __future__ import annotations

import inspect
import re
import sys
import typing
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import typer
from typer.models import OptionInfo

from blocks import main_of, table
from poetmodel.cli.application import app

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from typer.models import ArgumentInfo, CommandInfo

PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "reference" / "commands.md"
"""The generated page."""

OPENING: Final = """\
# All commands

Generated from the code by `python scripts/make_commands.py`; `poetmodel COMMAND --help` prints the
same. [The command line](../cli.md) explains sizes, times, energies and exit statuses.
"""

HEADS: Final = ("", "takes", "does", "default")
ARGUMENTS: Final = "Arguments"
OPTIONS: Final = "Options"
REQUIRED: Final = "required"


def page() -> str:
    """Return the page with every command, in the order of ``poetmodel --help``."""
    parts = [OPENING.strip()]
    for command in app.registered_commands:
        parts.extend(_told(command))
    return "\n\n".join(parts) + "\n"


class Row(NamedTuple):
    """One argument or option of a command."""

    panel: str
    """Heading under which it stands."""
    spelling: str
    takes: str
    does: str
    default: str

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """What its line in the table has."""
        names = ", ".join(map(_code, self.spelling.split(", ")))
        return (names, self.takes, _cell(self.does), _code(self.default))


def _told(command: CommandInfo) -> Iterator[str]:
    callback = cast("Callable[..., Any]", command.callback)
    rows = list(_rows(callback))
    arguments = [
        row.spelling if row.default == REQUIRED else f"[{row.spelling}]"
        for row in rows
        if row.panel == ARGUMENTS
    ]
    yield f"## `{command.name}`"
    yield " ".join((command.help or inspect.getdoc(callback) or "").split("\n\n")[0].split())
    yield f"```text\n{' '.join(['poetmodel', str(command.name), *arguments, '[OPTIONS]'])}\n```"
    if command.epilog:
        yield re.sub("^Example: (.+)", r"Example: `\1`", command.epilog)
    rows.sort(key=lambda row: row.panel != ARGUMENTS)
    for panel in dict.fromkeys(row.panel for row in rows):
        yield f"**{panel}**"
        yield table(HEADS, [row.cells for row in rows if row.panel == panel])


def _rows(callback: Callable[..., Any]) -> Iterator[Row]:
    hints = typing.get_type_hints(callback, include_extras=True)
    for name, parameter in inspect.signature(callback).parameters.items():
        if hints[name] is typer.Context:
            continue
        kind, information = typing.get_args(hints[name])[:2]
        is_option = isinstance(information, OptionInfo)
        if not information.hidden:
            yield Row(
                panel=information.rich_help_panel or (OPTIONS if is_option else ARGUMENTS),
                spelling=_spelling(name, information),
                takes=_takes(kind, information) if is_option else "",
                does=information.help or "",
                default=_default(parameter.default),
            )


def _spelling(name: str, information: OptionInfo | ArgumentInfo) -> str:
    if not isinstance(information, OptionInfo):
        return information.metavar or name.upper()
    first = information.default  # in an annotation the first name stands in the default's place
    names = [*([first] if isinstance(first, str) else []), *(information.param_decls or ())]
    return ", ".join(names or [f"--{name.replace('_', '-')}"])


def _takes(kind: Any, information: OptionInfo) -> str:
    for part in (kind, *typing.get_args(kind)):
        if isinstance(part, type) and issubclass(part, Enum):
            return ", ".join(_code(member.value) for member in part)
    return "" if kind is bool else _code(information.metavar or "N")


def _default(value: object) -> str:
    if value is inspect.Parameter.empty:
        return REQUIRED
    if value is None or value is False:
        return ""
    return str(value.value if isinstance(value, Enum) else value)


def _code(text: str) -> str:
    if text in ("", REQUIRED):
        return text
    escaped = text.replace("|", "\\|")
    return f"`{escaped}`"


def _cell(text: str) -> str:
    return re.sub(r"([|*<_])", r"\\\1", " ".join(text.split()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Make or check the page; return the exit status."""
    return main_of(lambda: {PAGE: page()}, arguments)


if __name__ == "__main__":
    sys.exit(main())
