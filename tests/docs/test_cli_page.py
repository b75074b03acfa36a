"""The page on the command line names every command, option and exit status there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer.main

from poetmodel.cli.application import app
from poetmodel.cli.failures import ExitStatus

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "reference" / "cli.md").read_text(encoding="utf-8")
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
STAGED = {ExitStatus.FAILURE, ExitStatus.INTERRUPTED, ExitStatus.CLOSED_PIPE}
"""ExitStatuses that speak of the program or the shell, not of the result."""


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_command_is_on_the_page(name: str) -> None:
    """Each command has a row."""
    assert f"`poetmodel {name}" in PAGE


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_option_is_on_the_page(command: str) -> None:
    """Each option is named, in its own spelling."""
    names = [
        name
        for option in COMMANDS[command].params
        for name in option.opts
        if name.startswith("--") and name != "--help"
    ]
    assert names
    assert [name for name in names if not re.search(rf"{name}(?![\w-])", PAGE)] == []


@pytest.mark.parametrize("status", sorted(set(ExitStatus) - STAGED))
def test_exit_status_is_on_the_page(status: ExitStatus) -> None:
    """Each exit status has a row."""
    assert f"\n| {status.value} |" in PAGE
