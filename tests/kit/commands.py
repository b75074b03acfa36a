"""Execution of commands in this process; a small graph, a board and a profile for them."""

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
"""File of `BOARD`, with blocking storage: 1 s and 1 J per node, 2 ms per transfer of 100 B."""
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
"""All commands, built once, because typer builds them as slowly as a command executes."""

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
    """Return the text of the schedule file that ``solve`` writes for `chain` on the board."""
    out = Path("solved.json")
    options = ("--device", BOARD_FILE, *limits, "--out", out, "--quiet")
    invoke("solve", CHAIN, *options, status=0)
    text = out.read_text()
    out.unlink()
    return text


def write_solved(name, *limits):
    """Write the schedule file of `chain` on the board; return its path.

    `limits` are options of ``solve``; each combination is solved only once.
    """
    path = Path(name)
    path.write_text(_solve_chain(limits))
    return path


class Terminal(io.StringIO):
    """A text stream that claims to be a terminal."""

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
        """Text on stdout before the first empty line."""
        return self.out.split("\n\n")[0]

    def lines_from(self, label):
        """Return the lines of a table on stdout, from the one that begins with `label` on."""
        return self.out[self.out.index(f"\n{label}") + 1 :].split("\n\n")[0]


def invoke(*arguments, status=None):
    """Execute a command in this process; return its outcome.

    Fails if its exit status is not `status`, unless that is None.
    """
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="") for _ in range(2)]
    out, err = streams
    exit_code = None
    with redirect_stdout(out), redirect_stderr(err):
        try:
            COMMAND([str(argument) for argument in arguments], prog_name="poetmodel")
        except SystemExit as end:
            exit_code = end.code
    texts = []
    for stream in streams:
        stream.flush()
        stream.seek(0)
        texts.append(stream.read())
    assert isinstance(exit_code, int)
    assert status in (None, exit_code), (exit_code, *texts)
    return Outcome(exit_code, *texts)


def invoke_refused(*arguments, status=2):
    """Execute a command that must end with `status` and an empty stdout; return its stderr."""
    outcome = invoke(*arguments, status=status)
    assert outcome.out == ""
    return outcome.err


def node(name, *inputs, size=100, **keys):
    """Return the entry of a node with one output and one second of compute on the test board."""
    entry = {"name": name, "op": "op", "phase": "forward", "inputs": list(inputs)}
    return entry | {"output_bytes": size, "flops": 1_000_000} | keys


def chain():
    """Return the document of a forward and backward pass over two layers.

    The keep-all peak is at g2: x + h1 + h2 + loss + g2 = 404 B. The minimum RAM is that of g2:
    h1 + h2 + loss + g2 = 304 B. A single pass takes 6 s and 6 J on the test board.
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

    The keep-all peak is at dr: all but h and g1, 1,144 B. The minimum RAM is that of u2: w2 + dw2 =
    600 B. A single pass takes 11 s and 11 J on the test board.
    """
    state_entry = {"phase": "state", "flops": None}
    nodes = [
        node("x", phase="input"),
        node("w1", size=200, **state_entry),
        node("h", "x", "w1"),
        node("r", "h", in_place={"r": "h"}),
        node("w2", size=300, **state_entry),
        node("y", "r", "w2", size=40),
        node("g2", "y", size=40, phase="backward"),
        node("dw2", "g2", "r", size=300, phase="backward"),
        node("dr", "g2", "w2", phase="backward"),
        node("u2", "w2", "dw2", **_update_node("w2", 300)),
        node("g1", "dr", "r", phase="backward", in_place={"g1": "dr"}),
        node("dw1", "g1", "x", size=200, phase="backward"),
        node("u1", "w1", "dw1", **_update_node("w1", 200)),
    ]
    entries = [{key: value for key, value in entry.items() if value is not None} for entry in nodes]
    return {"format": "poetmodel-graph", "version": 2, "name": "step", "nodes": entries}


def _update_node(name, size):
    """Return the fields of a node entry that replaces a state tensor of `size` bytes."""
    outputs = [{"name": f"{name}+", "bytes": size, "replaces": name}]
    return {"phase": "update", "output_bytes": None, "outputs": outputs, "recomputable": False}


def profile_rows():
    """Return the rows of a profile of `chain`, its header first.

    Each node takes 1 s and 2 J, each transfer 1 s and 1 J.
    """
    names = [entry["name"] for entry in chain()["nodes"]]
    return [list(COLUMNS), *([name, "1", "2", "1", "1", "1", "1"] for name in names)]


def write_csv(path, rows):
    """Write rows as a CSV file; return its path."""
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows(rows)
    return path


def write_graph(path, document):
    """Write a graph document as a file; return its path."""
    path.write_text(json.dumps(document))
    return path
