"""Closed streams, pipes without readers, and the line that shows progress."""

import io
import os
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from itertools import product
from pathlib import Path

import pytest

from kit.commands import BOARD_FILE, CHAIN, Terminal, invoke
from kit.rotation import mark_seeds_except
from poetmodel.cli.application import app
from poetmodel.cli.output import LiveLine, live_line
from poetmodel.device import Costs
from poetmodel.graph import Graph, operation
from poetmodel.problem import Problem
from poetmodel.solver.request import SolveProgress

PROGRAM = (sys.executable, "-m", "poetmodel")
TABLES = ("models", "--help", "solve --help", "inspect mlp --json", "")


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
@pytest.mark.parametrize(
    ("redirection", "arguments", "status"),
    mark_seeds_except(
        [
            (redirection, *command)
            for redirection in (">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-")
            for command in (("models", 0), ("inspect nothing", 2), ("solve --nonsense", 2))
        ],
        {(">&-", "models", 0), ("2>&-", "solve --nonsense", 2), ("<&- >&- 2>&-", "models", 0)},
    ),
)
def test_closed_streams_are_read_and_written_as_nothing(redirection, arguments, status):
    """The exit status is the same, and open streams get no traceback."""
    found = run(redirection, *arguments.split())
    assert found.returncode == status
    assert "Traceback" not in found.stdout + found.stderr
    if redirection == "2>&-" and status:
        assert found.stdout == ""


@pytest.mark.slow
def test_files_are_written_with_closed_streams():
    """An opened file never has the number of a closed stream: it contains only its own text."""
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
    mark_seeds_except(
        product((*TABLES, "inspect nothing"), ("stdout", "stderr", "both")),
        {("models", "stdout"), ("inspect nothing", "stderr"), ("models", "both")},
    ),
)
def test_closed_pipe_ends_as_by_its_signal(arguments, streams):
    """If the reader of a pipe has ended, the status is 128 + SIGPIPE, without output."""
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
def test_schedule_and_plan_are_saved_where_nobody_reads_the_answer():
    """A pipe without a reader ends a command while it prints, after its file is written."""
    schedule, plan = Path("unread.schedule.json"), Path("unread.plan.json")
    given = ("--graph", CHAIN, "--device", BOARD_FILE)
    for command in (
        ("solve", *given, "--ram", 350, "--out", schedule),
        ("plan", schedule, *given, "--out", plan),
    ):
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer) as unread:
            words = (*PROGRAM, *map(str, command))
            ended = subprocess.run(words, check=False, stdout=unread, stderr=subprocess.PIPE)
        assert ended.returncode == 141
        assert command[-1].stat().st_size > 0


@pytest.mark.slow
@pytest.mark.parametrize("level", ["1", "2"])
def test_docstrings_are_not_needed(level):
    """With PYTHONOPTIMIZE=2, results are the same, and help still describes the commands."""
    given = ("solve", "--graph", CHAIN, "--device", BOARD_FILE, "--ram", 350)
    found = run("", *given, PYTHONOPTIMIZE=level)
    assert (found.returncode, found.stderr) == (0, "")
    assert "optimal" in found.stdout
    assert "minimum energy" in run("", "--help", PYTHONOPTIMIZE=level).stdout


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


# -- progress ------------------------------------------------------------------------------------
STEP = Path(__file__).resolve().parents[2] / "docs" / "digits.step.json"


def problem(minimize="energy"):
    """Return a problem whose pass takes 4 s and 8 J."""
    graph = Graph(
        name="pair",
        nodes=(operation("a", output_bytes=8), operation("b", output_bytes=4, inputs=("a",))),
    )
    costs = Costs.from_arrays(graph, compute_time_s=[2, 2], compute_energy_j=[4, 4])
    return Problem(graph, costs, ram="100%", minimize=minimize)


def progress(incumbent, bound):
    """Return the state of a solve after one second."""
    return SolveProgress(seconds=1.0, overhead=incumbent, overhead_bound=bound)


@pytest.mark.parametrize(
    ("minimize", "state", "fragments"),
    [
        ("energy", progress(0.08, 0.04), ("overhead 1.0000%", "bound 0.5000%", "gap 50.00%")),
        ("time", progress(0.4, 0.4), ("time overhead 10.0000%", "gap 0.00%")),
        ("ram", progress(2048, 1024), ("peak RAM 2.00 KiB", "bound 1.00 KiB", "gap 50.00%")),
        ("writes", progress(100, 0), ("bytes paged out 100 B", "bound 0 B", "gap 100.00%")),
        ("energy", progress(None, 0.04), ("energy overhead none yet", "bound 0.5000%")),
        ("energy", progress(0.08, None), ("energy overhead 1.0000%", "bound none yet")),
    ],
)
def test_line_says_incumbent_bound_gap_and_seconds(minimize, state, fragments):
    """Energies and times are fractions of one pass, bytes are bytes; unknown values are marked."""
    line = LiveLine(problem(minimize))
    assert "solving" in line.text()
    line.update(state)
    for fragment in (*fragments, " s"):
        assert fragment in line.text()
    assert ("gap" in line.text()) == (state.gap is not None)
    assert len(line.text()) < 80


def test_line_says_what_is_done_where_there_is_no_problem():
    """Of a solve within a longer task the gap is known, and the seconds go on."""
    line = LiveLine(activity="planning")
    assert line.text() == "planning, 0 s"
    line.update(progress(0.08, 0.04))
    assert line.text() == "planning, gap 50.00%  0 s"


@pytest.mark.parametrize(
    ("stream", "wanted", "shown"),
    [(Terminal, True, True), (Terminal, False, False), (io.StringIO, True, False)],
)
def test_line_is_shown_only_where_someone_sees_it(stream, wanted, shown, monkeypatch):
    """The line requires a terminal and no ``--quiet``; it never goes to stdout."""
    stderr, stdout = stream(), io.StringIO()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(sys, "stdout", stdout)
    with live_line(problem(), enabled=wanted) as on_progress:
        assert (on_progress is not None) == shown
        if on_progress is not None:
            on_progress(progress(0.08, 0.04))
    assert ("energy overhead" in stderr.getvalue()) == shown
    assert stdout.getvalue() == ""


@pytest.mark.parametrize("json", [False, True])
def test_commands_that_take_long_say_what_they_do(json, monkeypatch):
    """On a terminal, they show a line on stderr; with --json, and in a pipe, none."""
    monkeypatch.setenv("TERM", "xterm")
    invoke("solve", "mlp", "--device", "mkr1000", "--ram", "70%", "--out", "a.json", status=0)
    for words, doing in (
        (("verify", "a.json", "--graph", "mlp"), "verifying"),
        (("plan", "a.json", "--graph", "mlp"), "planning"),
        (("report", "a.json", "--graph", "mlp", "--out", "a.html"), "drawing"),
        (("diff", "a.json", "a.json", "--graph", "mlp"), "verifying"),
        (("limits", "mlp", "--device", "mkr1000", "--time-limit", "5"), "finding limits"),
        (("explain", "a.json", "--graph", "mlp"), "verifying"),
        (("export", str(STEP), "--out", "c"), "solving, planning and placing"),
    ):
        arguments = [*words, *["--json"] * json]
        with (
            redirect_stderr(Terminal()) as seen,
            redirect_stdout(io.StringIO()),
            pytest.raises(SystemExit) as ended,
        ):
            app(arguments, prog_name="poetmodel")
        assert ended.value.code == 0
        assert (doing in seen.getvalue()) == (not json), words
    assert "verifying" not in invoke("verify", "a.json", "--graph", "mlp").err
