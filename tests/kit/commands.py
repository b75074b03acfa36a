"""Execution of commands in this process, with a small graph, board and profile."""

import csv
import io
import json
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from typer.main import get_command

from poetmodel.cli.application import app

CHAIN = Path("chain.graph.json")
"""File of `chain`, in the folder of each test of the command line."""
BOARD_FILE = Path("board.toml")
"""File of a blocking board: 1 s and 1 J per node, 2 ms per transfer of 100 B."""
PROFILE = Path("chain.csv")
"""File of `profile_rows`."""
BOARD = """\
name = "Test board"
core = "one core"
ram_bytes = 1_000_000
aux_bytes = 1_000_000
source = "made up for tests"
[compute]
flops_per_s = 1e6
power_w = 1.0
[storage]
mode = "blocking"
[storage.page_in]
latency_s = 0.001
bytes_per_s = 100000.0
power_w = 1.0
[storage.page_out]
latency_s = 0.001
bytes_per_s = 100000.0
power_w = 1.0
"""

COMMAND = get_command(app)
"""The parser of all commands, built once because typer takes as long as a command for it."""

COLUMNS = (
    "name",
    "compute_time_s",
    "compute_energy_j",
    "page_in_time_s",
    "page_in_energy_j",
    "page_out_time_s",
    "page_out_energy_j",
)


@cache
def _solve_chain(limits):
    """Return the schedule file that ``solve`` writes for `chain` on the board."""
    out = Path("solved.json")
    how = ("--device", BOARD_FILE, *limits, "--out", out, "--quiet")
    invoke("solve", CHAIN, *how, status=0)
    text = out.read_text()
    out.unlink()
    return text


def write_solved(name, *limits):
    """Write the schedule file of `chain` on the board within some limits, solved once."""
    path = Path(name)
    path.write_text(_solve_chain(limits))
    return path


class Terminal(io.StringIO):
    """A stderr that is a terminal."""

    def isatty(self):
        """Return True."""
        return True


@dataclass(frozen=True, slots=True)
class Outcome:
    """Exit status and output of a command."""

    status: int
    """Exit status."""
    out: str
    """Text on stdout."""
    err: str
    """Text on stderr."""

    @property
    def json(self):
        """The JSON object on stdout."""
        return json.loads(self.out)

    @property
    def verdict(self):
        """Text above the first table on stdout."""
        return self.out.split("\n\n")[0]

    def lines_from(self, label):
        """Return the lines of a table on stdout from the one with a label on."""
        return self.out[self.out.index(f"\n{label}") + 1 :].split("\n\n")[0]


def invoke(*arguments, status=None):
    """Execute a command in this process; raise if it ends with another status."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="") for _ in range(2)]
    out, err = streams
    ended = None
    with redirect_stdout(out), redirect_stderr(err):
        try:
            COMMAND([str(argument) for argument in arguments], prog_name="poetmodel")
        except SystemExit as end:
            ended = end.code
    texts = []
    for stream in streams:
        stream.flush()
        stream.seek(0)
        texts.append(stream.read())
    assert isinstance(ended, int)
    assert status in (None, ended), (ended, *texts)
    return Outcome(ended, *texts)


def refused(*arguments, status=2):
    """Return stderr of a command that must end with a status and print nothing to stdout."""
    outcome = invoke(*arguments, status=status)
    assert outcome.out == ""
    return outcome.err


def node(name, *inputs, size=100, **keys):
    """Return the entry of a node with one output and one second of compute on the test board."""
    entry = {"name": name, "op": "op", "phase": "forward", "inputs": list(inputs)}
    return entry | {"output_bytes": size, "flops": 1_000_000} | keys


def chain():
    """Return the document of a forward and backward pass over two layers.

    Everything kept, the peak is at g2: x + h1 + h2 + loss + g2 = 404 B. The floor is g2's step
    alone: h1 + h2 + loss + g2 = 304 B. One pass takes 6 s and 6 J on the test board.
    """
    nodes = [
        node("x", phase="input"),
        node("h1", "x"),
        node("h2", "h1"),
        node("loss", "h2", size=4, phase="loss"),
        node("g2", "loss", "h2", "h1", phase="backward"),
        node("g1", "g2", "x", phase="backward"),
    ]
    return {"format": "poetmodel-graph", "version": 1, "name": "chain", "nodes": nodes}


def training_step():
    """Return the document of a training step over two layers with weights that are updated.

    Everything kept, the peak is at dr: all but h and g1, 1,144 B. The floor is the second update's
    step alone: w2 + dw2 = 600 B. One pass takes 11 s and 11 J on the test board.
    """
    in_ram = {"phase": "state", "flops": None}
    nodes = [
        node("x", phase="input"),
        node("w1", size=200, **in_ram),
        node("h", "x", "w1"),
        node("r", "h", in_place={"r": "h"}),
        node("w2", size=300, **in_ram),
        node("y", "r", "w2", size=40),
        node("g2", "y", size=40, phase="backward"),
        node("dw2", "g2", "r", size=300, phase="backward"),
        node("dr", "g2", "w2", phase="backward"),
        node("u2", "w2", "dw2", **_update_node("w2", 300)),
        node("g1", "dr", "r", phase="backward", in_place={"g1": "dr"}),
        node("dw1", "g1", "x", size=200, phase="backward"),
        node("u1", "w1", "dw1", **_update_node("w1", 200)),
    ]
    known = [{key: value for key, value in entry.items() if value is not None} for entry in nodes]
    return {"format": "poetmodel-graph", "version": 2, "name": "step", "nodes": known}


def _update_node(name, size):
    """Return the entry of a node that replaces a state tensor."""
    outputs = [{"name": f"{name}+", "bytes": size, "replaces": name}]
    return {"phase": "update", "output_bytes": None, "outputs": outputs, "recomputable": False}


def profile_rows():
    """Return a profile of `chain`, heads first: 1 s and 2 J a node, 1 s and 1 J a transfer."""
    names = [entry["name"] for entry in chain()["nodes"]]
    return [list(COLUMNS), *([name, "1", "2", "1", "1", "1", "1"] for name in names)]


def write_csv(path, rows):
    """Write rows as a CSV file."""
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows(rows)
    return path


def write_graph(path, document):
    """Write a graph file."""
    path.write_text(json.dumps(document))
    return path
