"""Printed text: tables of all widths, all kinds of names, and no output with ``--quiet``."""

import json
import logging
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from typer.main import get_command

from kit.commands import BOARD_FILE, CHAIN, chain, invoke, write_graph
from kit.rotation import mark_seeds_except
from poetmodel.cli.application import app
from poetmodel.cli.output import MAX_LINE, _fit_widths, print_note, printable

COMMANDS = sorted(info.name or "" for info in app.registered_commands)
LISTS = ("models", "devices", "inspect resnet18-cifar", "devices rpi4b", "models mlp")


@pytest.fixture
def no_columns(monkeypatch):
    """Leave the width to the stream."""
    monkeypatch.delenv("COLUMNS", raising=False)


@given(
    bounds=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 60)), max_size=6),
    room=st.integers(-5, 200),
)
def test_columns_share_the_room(bounds, room):
    """Each is between its longest word and its longest cell, and no room is wasted or overdrawn."""
    least = [min(pair) for pair in bounds]
    most = [max(pair) for pair in bounds]
    widths = _fit_widths(least, most, room)
    assert all(a <= w <= b for a, w, b in zip(least, widths, most, strict=True))
    assert sum(widths) <= max(room, sum(least))
    if sum(most) <= room:
        assert widths == most


@pytest.mark.slow
@pytest.mark.parametrize("width", [200, 80, 60, 40])
@pytest.mark.parametrize("command", LISTS)
def test_no_word_breaks_at_any_width(command, width, monkeypatch):
    """A wrapped table has all words of the unwrapped one; no line is longer than 80 columns.

    Only names and paths continue on the next line, after a point, a slash or an underscore.
    """
    monkeypatch.delenv("COLUMNS", raising=False)
    words = set(invoke(*command.split()).out.split())
    monkeypatch.setenv("COLUMNS", str(width))
    wrapped = invoke(*command.split()).out
    missing = words - set(wrapped.split())
    assert {word for word in missing if not re.search(r"[._/][a-z]|─", word)} == set()
    tables = [line for line in wrapped.splitlines() if "  " in line.strip()]
    if width >= 80:
        assert max(map(cell_len, tables)) <= width


@pytest.mark.usefixtures("no_columns")
@pytest.mark.parametrize("command", LISTS)
def test_pipe_has_no_edge(command):
    """In a pipe a row is a line, without blanks at its end."""
    out = invoke(*command.split()).out
    assert all(line == line.rstrip() for line in out.splitlines())
    if command == "devices rpi4b":
        assert max(map(len, out.splitlines())) > 80


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_all_of_what_is_written(command, monkeypatch):
    """No word of a help text is parsed as markup, which rich omits."""
    monkeypatch.setenv("COLUMNS", "2000")
    out = " ".join(invoke(command, "--help").out.split())
    for parameter in get_command(app).commands[command].params:
        assert " ".join((parameter.help or "").split()) in out


@pytest.mark.slow
def test_quiet_commands_print_nothing(told):
    """No tables, warnings or notes; files are written, JSON is printed, errors are reported."""
    schedule = Path("chain.schedule.json")
    given = ("--graph", CHAIN)
    solve = ("solve", *given, "--device", BOARD_FILE, "--ram", 350, "--out", schedule)
    sweep = ("--devices", "rpi4b", "--ram", "80%", "--methods", "lru-paging")
    for arguments in (
        solve,
        ("verify", schedule, *given),
        ("plan", schedule, *given),
        ("plan", schedule, *given, "--format", "text"),
        ("explain", schedule, *given),
        ("diff", schedule, schedule, *given),
        ("report", schedule, *given, "--out", Path("page.html")),
        ("limits", *given, "--device", BOARD_FILE, "--ram", 350),
        ("inspect", *given),
        ("profile", CHAIN, "--device", BOARD_FILE),
        ("models",),
        ("devices", "rpi4b"),
        ("sweep", "mlp", *sweep, "--out", Path("sweep")),
    ):
        outcome = invoke(*arguments, "--quiet")
        assert (outcome.status, outcome.out, outcome.err) == (0, "", ""), arguments
    assert schedule.exists()
    assert (Path("sweep") / "cells.csv").exists()
    assert json.loads(invoke("models", "--quiet", "--json").out)
    told(invoke("models", "nope", "--quiet").err)
    assert invoke("models").out


def test_settings_of_a_command_end_with_it(capsys):
    """After a quiet command, notes are printed; warnings of the library are no longer its own."""
    handlers = list(logging.getLogger("poetmodel").handlers)
    invoke("models", "--quiet", status=0)
    print_note("a note")
    assert capsys.readouterr().err == "a note\n"
    assert logging.getLogger("poetmodel").handlers == handlers


HOSTILE = (
    "a" * 10_000,
    "\x1b[31mred\x1b[0m",
    "two\nlines",
    "[bold]markup[/bold]",
    "[/nothing]",
    "\u202eright to left",
    "\x07\x00",
    "名" * 3_000,
    "many words " * 2_000,
    ":smile:",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", mark_seeds_except(HOSTILE, HOSTILE[::3]))
def test_names_neither_steer_nor_flood(name):
    """A name from a file is printed on one line, without control characters, and cut if endless."""
    document = json.loads(json.dumps(chain()).replace('"x"', json.dumps(name)))
    document["name"] = name
    graph = write_graph(Path("odd.graph.json"), document)
    given = ("--graph", graph)
    schedule = Path("odd.schedule.json")
    for arguments in (
        ("inspect", *given),
        ("solve", *given, "--device", BOARD_FILE, "--ram", 350, "--out", schedule),
        ("solve", *given, "--device", BOARD_FILE, "--ram", 10),
        ("limits", *given, "--device", BOARD_FILE, "--ram", 350),
        ("verify", schedule, *given),
        ("plan", schedule, *given),
        ("plan", schedule, *given, "--format", "text"),
        ("explain", schedule, *given),
        ("explain", schedule, name.replace("\x00", ""), *given),
        ("diff", schedule, schedule, *given),
        ("verify", schedule, "--graph", "mlp"),
    ):
        outcome = invoke(*arguments)
        printed = outcome.out + outcome.err
        assert len(printed) < 20_000, arguments
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u202e]", printed), arguments
        assert "Traceback" not in printed


def test_steps_of_thousands_of_tensors_stay_short(told):
    """Of an endless text, or of a node that reads 500 tensors, a part is printed."""
    names = [f"source{i}" for i in range(500)]
    nodes = [
        {"name": name, "op": "x", "phase": "forward", "inputs": [], "output_bytes": 4}
        for name in names
    ]
    nodes.append({"name": "sink", "op": "x", "phase": "loss", "inputs": names, "output_bytes": 4})
    document = {"format": "poetmodel-graph", "version": 1, "name": "wide", "nodes": nodes}
    graph = write_graph(Path("wide.graph.json"), document)
    inspected = invoke("inspect", graph)
    assert len(inspected.out) < 3_000
    assert "and 492 more" in inspected.out
    refused = invoke("solve", graph, "--device", BOARD_FILE, "--ram", 100, "--time-limit", 2)
    assert refused.status == 3
    assert len(refused.err) < 1_000
    told(refused.err)
    text = printable("begin " + "word " * 100_000 + "end")
    assert len(text) <= MAX_LINE
    assert (text[:5], text[-3:]) == ("begin", "end")
    assert printable("one two " * 1000, max_characters=21) == "one two one...ne two "
    assert printable("a" * 1000, max_word=12) == "aaaaa...aaaa"
    assert printable("x" * 240) == "x" * 240
