"""The pages on what a version keeps and on the command line name all there is, and nothing else."""

import re
from pathlib import Path

import pytest
import typer.main

import poetmodel
import poetmodel.torch
from poetmodel.cli.application import app
from poetmodel.cli.failures import ExitStatus

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reference" / "promises.md").read_text(encoding="utf-8")
SOURCES = ROOT / "src" / "poetmodel"
FUNCTION = re.compile(r"^(?:int|pm_real|const void \*) ?(pm_\w+)\([^;{]*\);", re.MULTILINE)
"""The declaration of a function in a header of exported C."""
FILES = {
    "poetmodel-graph": "graph/io.py",
    "poetmodel-schedule": "schedule/relations.py",
    "poetmodel-plan": "plan/program.py",
    "poetmodel-step": "export/io.py",
    "poetmodel-compiled-step": "report/step_file.py",
    "poetmodel-export": "export/folder.py",
}
"""The module that states the newest version of each format."""


def listed(heading):
    """Return the names in code of the paragraph that begins with a heading."""
    (paragraph,) = [part for part in PAGE.split("\n\n") if part.startswith(f"**{heading}**")]
    return re.findall(r"`([^`]+)`", paragraph.split("**:", 1)[1])


@pytest.mark.parametrize("module", [poetmodel, poetmodel.torch], ids=lambda module: module.__name__)
def test_names_are_those_of_the_module(module):
    """Each public name of Python is on the page, in the order of ``__all__``."""
    assert listed(f"`{module.__name__}`") == sorted(module.__all__)  # type: ignore[attr-defined]


def test_functions_of_c_are_those_of_the_headers():
    """Each function that exported headers declare is on the page."""
    headers = ("export/source.py", "export/c/pm_driver.h")
    texts = [(SOURCES / header).read_text(encoding="utf-8") for header in headers]
    declared = {name for text in texts for name in FUNCTION.findall(text)}
    assert len(declared) > 10
    assert {name for name in listed("Exported C") if name.startswith("pm_")} == declared


def test_every_option_on_the_reference_exists():
    """The reference of the command line, which the page refers to, names no option of its own."""
    known = {
        name for command in COMMANDS.values() for option in command.params for name in option.opts
    }
    known |= {"--help", "--version", "--install-completion"}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", CLI)) <= known


def test_formats_are_those_that_are_written():
    """Each format of a file is on the page, up to the newest version that is written."""
    rows = dict(re.findall(r"^\| `(poetmodel-[\w-]+)` \| ([\d, ]+) \|$", PAGE, re.MULTILINE))
    assert set(rows) == set(FILES)
    for name, file in FILES.items():
        text = (SOURCES / file).read_text(encoding="utf-8")
        stated = re.findall(r'^VERSION\w*: Final = (.+)$|"version": (\d+)', text, re.MULTILINE)
        versions = {int(digit) for pair in stated for digit in re.findall(r"\d+", "".join(pair))}
        assert max(int(version) for version in rows[name].split(",")) == max(versions), name


# -- the reference of the command line -------------------------------------------------------------
CLI = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
STAGED = {ExitStatus.FAILURE, ExitStatus.INTERRUPTED, ExitStatus.CLOSED_PIPE}
"""ExitStatuses that speak of the program or the shell, not of the result."""


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_option_is_on_the_page(command):
    """Each command has a row; each option is named, in its own spelling."""
    assert f"`poetmodel {command}" in CLI
    names = [
        name
        for option in COMMANDS[command].params
        for name in option.opts
        if name.startswith("--") and name != "--help"
    ]
    assert names
    assert [name for name in names if not re.search(rf"{name}(?![\w-])", CLI)] == []


@pytest.mark.parametrize("status", sorted(set(ExitStatus) - STAGED))
def test_exit_status_is_on_the_page(status):
    """Each exit status has a row."""
    assert f"\n| {status.value} |" in CLI
