"""The generated page of commands has what the command line has."""

from __future__ import annotations

import re
from typing import Annotated

import pytest
import typer
import typer.main

import make_commands
from poetmodel.cli.application import app

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
SECTIONS = dict(re.findall(r"^## `([\w-]+)`\n(.*?)(?=^## |\Z)", make_commands.page(), re.M | re.S))


def test_every_command_has_its_section() -> None:
    """The page has the commands of the program, no more and no less."""
    assert list(SECTIONS) == list(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_in_the_section_of_its_command(name: str) -> None:
    """Each option stands there in each of its spellings, and nothing that is no option."""
    options = {word for option in COMMANDS[name].params for word in option.opts if word[:1] == "-"}
    told = {
        word for row in re.findall(r"^\| (.*?) \|", SECTIONS[name], re.M) for word in _words(row)
    }
    assert told == options - {"--help", "-h"}


def _words(cell: str) -> list[str]:
    return [word for word in re.findall(r"`([^`]+)`", cell) if word.startswith("-")]


@pytest.mark.parametrize("name", COMMANDS)
def test_example_of_the_help_is_there(name: str) -> None:
    """The example at the end of a command's help is on the page, as code."""
    epilog = COMMANDS[name].epilog or ""
    assert epilog.startswith("Example: ")
    assert f"Example: `{epilog.removeprefix('Example: ')}`" in SECTIONS[name]


def test_figures_of_an_option_are_in_their_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices, metavars, defaults and characters that Markdown reads come out as they are."""
    program = typer.Typer()

    @program.command("try", epilog="Example: poetmodel try a")
    def run(
        file: Annotated[str, typer.Argument(metavar="FILE|NAME", help="What to *try*.")],
        *,
        many: Annotated[int, typer.Option("--many", "-m", metavar="N", help="How many.")] = 3,
        loud: Annotated[bool, typer.Option("--loud", help="Say a|b.")] = False,
        secret: Annotated[bool, typer.Option("--secret", hidden=True)] = False,
    ) -> None:
        """Try it."""

    monkeypatch.setattr(make_commands, "app", program)
    page = make_commands.page()
    assert "\nTry it.\n" in page
    assert "\npoetmodel try FILE|NAME [OPTIONS]\n" in page
    assert "\n| `FILE\\|NAME` |  | What to \\*try\\*. | required |\n" in page
    assert "\n| `--many`, `-m` | `N` | How many. | `3` |\n" in page
    assert "\n| `--loud` |  | Say a\\|b. |  |\n" in page
    assert "secret" not in page
