"""Streams that are closed, pipes that nobody reads, and an interpreter without docstrings."""

import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from kit.commands import BOARD_FILE, CHAIN
from kit.rotation import rotating

PROGRAM = (sys.executable, "-m", "poetmodel")
TABLES = ("models", "--help", "solve --help", "inspect mlp --json", "doctor", "")


def run(redirection, *arguments, **settings):
    """Run a command by a shell that redirects its streams."""
    command = 'exec "$@" ' + redirection
    return subprocess.run(
        ["/bin/sh", "-c", command, "sh", *PROGRAM, *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | settings,
    )


@pytest.mark.slow
@pytest.mark.parametrize("redirection", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(
    ("arguments", "status"), [("models", 0), ("inspect nothing", 2), ("solve --nonsense", 2)]
)
def test_closed_streams_are_read_and_written_as_nothing(redirection, arguments, status):
    """The exit status is the same, and what is still open gets no traceback."""
    found = run(redirection, *arguments.split())
    assert found.returncode == status
    assert "Traceback" not in found.stdout + found.stderr
    if redirection == "2>&-" and status:
        assert found.stdout == ""


@pytest.mark.slow
def test_files_are_written_with_closed_streams():
    """A file that is opened takes the number of no closed stream: nothing else gets into it."""
    files = [Path("open.schedule.json"), Path("closed.schedule.json")]
    given = ("solve", "--graph", CHAIN, "--device", BOARD_FILE, "--ram", 350)
    assert run("", *given, "--out", files[0]).returncode == 0
    assert run(">&- 2>&-", *given, "--verbose", "--out", files[1]).returncode == 0
    relations = [
        [line for line in path.read_text().splitlines() if not re.search("_s|history", line)]
        for path in files
    ]
    assert relations[0] == relations[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "streams"),
    rotating(
        product((*TABLES, "inspect nothing"), ("stdout", "stderr", "both")),
        {("models", "stdout"), ("inspect nothing", "stderr"), ("doctor", "both")},
    ),
)
def test_closed_pipe_ends_as_by_its_signal(arguments, streams):
    """Where nobody reads what is written, the status is 128 + SIGPIPE, and nothing is said."""
    read, write = os.pipe()
    os.close(read)
    targets = {
        "stdout": write if streams != "stderr" else subprocess.PIPE,
        "stderr": write if streams != "stdout" else subprocess.PIPE,
    }
    try:
        found = subprocess.run([*PROGRAM, *arguments.split()], check=False, text=True, **targets)  # type: ignore[call-overload]
    finally:
        os.close(write)
    fails = arguments == "inspect nothing"
    broken = streams == "both" or (streams == "stderr") == fails
    assert found.returncode == (141 if broken else 2 if fails else 0)
    assert "Traceback" not in (found.stderr or "")
    assert "Exception ignored" not in (found.stderr or "")


@pytest.mark.slow
@pytest.mark.parametrize("level", ["1", "2"])
def test_docstrings_are_not_needed(level):
    """With PYTHONOPTIMIZE=2 the same is found, and help still says what commands do."""
    given = ("solve", "--graph", CHAIN, "--device", BOARD_FILE, "--ram", 350)
    found = run("", *given, PYTHONOPTIMIZE=level)
    assert (found.returncode, found.stderr) == (0, "")
    assert "optimal" in found.stdout
    assert "least energy" in run("", "--help", PYTHONOPTIMIZE=level).stdout


def test_library_says_that_docstrings_are_needed():
    """Pyomo cannot be imported without them; that is one sentence of ours, not an error of its."""
    script = """
import poetmodel as pm
graph = pm.zoo.mlp()
problem = pm.Problem(graph, pm.Costs.estimate(graph, pm.Device.load("rpi4b")), ram="70%")
try:
    pm.solve(problem)
except pm.errors.PoetModelError as error:
    print(error)
"""
    found = subprocess.run(
        [sys.executable, "-OO", "-c", script], check=False, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    assert "docstrings" in found.stdout
