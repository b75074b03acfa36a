"""``poetmodel solve``: outputs, files, exit status, and counts of the table."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from kit.commands import BOARD, BOARD_FILE, CHAIN, PROFILE, chain, invoke, write_graph
from kit.patience import PATIENCE_S, wait_until
from poetmodel.cli.summary import decision_facts
from poetmodel.errors import BackendUnavailableError, InputError
from poetmodel.graph import Graph, Node, Tensor, operation
from poetmodel.result import SolveResult, Status, Termination
from poetmodel.schedule import Schedule, checkpoint_all, simulate
from poetmodel.units import parse_time

FIGURES = ("energy_j", "bound_j", "overhead_j", "gap", "peak_ram_bytes", "compute_s", "transfer_s")


def solve(*arguments, **due):
    """Run the command on the chain and the board, with more options."""
    return invoke("solve", "--graph", CHAIN, "--device", BOARD_FILE, *arguments, **due)


def test_neither_paging_nor_recomputing_is_proven_infeasible(told):
    """With both forbidden, less than the keep-all peak is not enough: exit 3."""
    outcome = solve("--ram", "350", "--no-paging", "--no-recompute", status=3)
    assert outcome.out == ""
    told(outcome.err)
    assert solve("--ram", "404", "--no-paging", "--no-recompute").status == 0


def test_infeasible_says_what_would_do():
    """Feasible changes follow the reason, one per line, in words and in JSON.

    With 350 B, the sample x must leave RAM, for 4 ms of paging; keep-all needs 404 B.
    """
    outcome = solve("--ram", "350", "--deadline", "100%", "--json", status=3)
    first, *more = outcome.err.splitlines()
    assert first.startswith("error: infeasible: proved: no schedule meets")
    assert more == [
        "hint: feasible from 404 bytes of RAM, which 'g2' takes with x, h1, h2 and 2 more in RAM",
        "hint: feasible from 6.004 s as the deadline",
    ]
    assert (outcome.json["status"], outcome.json["energy_j"]) == ("infeasible", None)
    assert "R" not in outcome.json
    assert "infeasible" not in solve("--ram", "350", "--json").json
    answer = outcome.json["infeasible"]
    assert [f"hint: {sentence}" for sentence in answer["sentences"]] == more
    assert [change["nearest"] for change in answer["changes"][:2]] == pytest.approx([404, 6.004])
    assert solve("--ram", "350", "--deadline", "6.004s").status == 0
    assert solve("--ram", "404", "--deadline", "100%").status == 0


def test_interrupted_explanation_leaves_the_answer(monkeypatch):
    """Ctrl-C during the explanation ends with the known reason: exit 3."""
    from poetmodel.solver.sensitivity import explanation

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(explanation, "explain_infeasible", interrupted)
    outcome = solve("--ram", "200", status=3)
    assert len(outcome.err.splitlines()) == 1


def test_json_on_stdout_is_the_object_in_the_file():
    """--json prints the object that --out writes, and only that; the log goes to stderr."""
    out = Path("x.schedule.json")
    outcome = solve("--ram", "350", "--out", out, "--json", status=0)
    assert outcome.json == json.loads(out.read_text())
    assert outcome.json["format"] == "poetmodel-schedule"
    outcome = solve("--ram", "350", "--verbose", "--json")
    assert "HiGHS" in outcome.err
    assert outcome.json["status"] == "optimal"


def test_table_says_what_people_ask():
    """The table has every figure of a result, in 80 columns without colours."""
    outcome = solve("--ram", "350", "--deadline", "200%", status=0)
    assert outcome.err == ""
    rows = dict(re.findall(r"^(\w[\w ]*?)  +(.*)$", outcome.out, flags=re.MULTILINE))
    assert rows["status"].startswith("optimal")
    assert rows["energy"].startswith("6.004 J")
    assert rows["overhead"].startswith("4 mJ")
    assert "0.06667 %" in rows["overhead"]
    assert rows["proven bound"].startswith("6.004 J")
    assert rows["gap"].startswith("0 %")
    assert "of the budget of 350 B" in rows["peak RAM"]
    assert rows["recomputed"].startswith("nothing")
    assert re.match(r"once +100 B written", rows["paged out"])
    assert re.match(r"once +100 B read", rows["paged in"])
    assert re.match(r"4 tensors +304 B", rows["kept"])
    assert rows["compute time"].startswith("6 s")
    assert rows["transfer time"].startswith("4 ms")
    assert re.match(r"12 s +serial", rows["deadline"])
    assert "time taken" in rows
    assert "lazy" in rows["solved by"]
    assert max(map(len, outcome.out.splitlines())) <= 80
    assert "\x1b" not in outcome.out


def test_profile_replaces_the_devices_costs():
    """With both, the profile has costs and the device RAM; alone, the profile has no RAM limit.

    In the profile, a node costs 2 J and a transfer 1 J: a pass is 12 J, and recomputing x (2 J)
    costs as much as paging it out and in.
    """
    common = ("solve", CHAIN, "--profile", PROFILE, "--json")
    both = invoke(*common, "--device", BOARD_FILE).json
    assert both["baseline_energy_j"] == pytest.approx(12.0)
    assert both["problem"]["ram_budget_bytes"] == 1_000_000
    assert both["problem"]["aux_bytes"] == 1_000_000
    alone = invoke(*common, "--ram", "350").json
    assert alone["overhead_j"] == pytest.approx(2.0)
    assert alone["problem"]["aux_bytes"] is None
    assert alone["device"] is None


def test_every_limit_reaches_the_problem():
    """Each option arrives as the stated problem of the file, in SI units."""
    outcome = solve(
        *("--ram", "90%", "--aux", "1kB", "--deadline", "110%", "--deadline-counts", "compute"),
        *("--minimize", "writes", "--energy-budget", "10mWh", "--no-recompute"),
        *("--count-parameters", "--time-limit", "7000ms", "--gap", "0.5", "--json"),
    )
    assert outcome.json["problem"] == {
        "ram_budget_bytes": 363,
        "deadline_s": pytest.approx(6.6),
        "deadline_counts": "compute",
        "recompute": False,
        "paging": True,
        "minimize": "writes",
        "energy_budget_j": pytest.approx(36.0),
        "aux_bytes": 1000,
        "count_parameters": True,
        "method": "optimal",
        "formulation": "lazy",
        "backend": "highs",
        "time_limit_s": 7.0,
        "gap": 0.5,
    }


@pytest.mark.parametrize("minimize", ["energy", "time", "ram", "writes"])
def test_table_fits_for_every_quantity(minimize):
    """The table states value and bound of any objective in 80 columns."""
    limits = ("--ram", "350", "--energy-budget", "200%", "--time-limit", "5")
    outcome = solve(*limits, "--minimize", minimize, status=0)
    assert max(map(len, outcome.out.splitlines())) <= 80
    assert (f"minimized {minimize}" in outcome.out) == (minimize != "energy")
    assert re.search(r"^gap +0 %", outcome.out, re.MULTILINE)
    assert ("proven bound" in outcome.out) == (minimize == "energy")
    names = [line.split("  ")[0].strip() for line in outcome.out.splitlines()]
    if minimize != "energy":  # what was asked for comes first
        assert names.index(f"minimized {minimize}") < names.index("energy")


def test_what_is_resident_is_told():
    """Parameters not counted in the budget are named as needed in addition; others as counted."""
    document = chain() | {"resident_bytes": {"parameters": 4096, "gradients": 4096}}
    path = write_graph(Path("g.json"), document)
    apart = invoke("solve", path, "--device", BOARD_FILE, "--ram", "350").out
    words = " ".join(apart.split())
    assert "resident RAM 8.00 KiB parameters, gradients: needed in addition to the budget" in words
    counted = invoke(
        "solve", path, "--device", BOARD_FILE, "--ram", "8542B", "--count-parameters"
    ).out
    assert re.search(r"resident RAM +8.00 KiB +parameters, gradients: counted", counted)
    assert re.search(r"peak RAM +304 B +99.5 % of the budget of 8.34 KiB", counted)
    assert "resident" not in invoke("solve", "mlp", "--device", "rpi4b").out.splitlines()[0]


def test_schedule_that_the_judge_rejects_exits_6_and_is_written(told):
    """The paper's model does not count that g2's inputs and output are in RAM together with x."""
    out = Path("x.schedule.json")
    outcome = solve("--ram", "310", "--formulation", "paper", "--out", out, status=6)
    told(outcome.err)
    assert "feasible" in outcome.out
    written = json.loads(out.read_text())
    assert written["violations"]
    assert written["peak_ram_bytes"] == 404
    assert invoke("verify", out, "--graph", CHAIN).status == 3


def test_reduction_of_the_papers_model_is_reported(told):
    """Nodes with several outputs, or without any, are merged: stderr, JSON and file state this."""
    out = Path("x.schedule.json")
    arguments = ("solve", "mlp", "--device", "rpi4b", "--ram", "100%", "--formulation", "paper")
    outcome = invoke(*arguments, "--out", out, "--json")
    assert outcome.status in (0, 6)
    told(outcome.err)
    assert "one tensor" in outcome.json["reduction"]
    written = json.loads(out.read_text())
    assert written["reduction"] == outcome.json["reduction"]
    assert "reduction" not in invoke(*arguments[:6], "--json").json


def test_implausible_device_is_warned_about_once():
    """Implausible values of a device are one warning line on stderr; --quiet suppresses it."""
    path = Path("odd.toml")
    path.write_text(BOARD.replace("[storage]", "flops_per_j = 10\n[storage]"))
    arguments = ("solve", CHAIN, "--device", path, "--ram", "350")
    outcome = invoke(*arguments, status=0)
    assert any(line.startswith("warning: device ") for line in outcome.err.splitlines())
    assert "warning" not in outcome.out
    assert invoke(*arguments, "--quiet").err == ""


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        (Termination.TIME_LIMIT, 4),
        (Termination.INTERRUPTED, 4),
        (KeyboardInterrupt(), 4),
        (BackendUnavailableError("SCIP is not installed; install poetmodel[scip]"), 5),
    ],
    ids=["time limit", "interrupted", "Ctrl-C", "no back end"],
)
def test_endings_without_a_schedule_have_their_status(ending, status, monkeypatch, told):
    """The reason is printed, for any solver; --json prints the object, and no file is written."""

    def find_nothing(problem, *_options):
        if isinstance(ending, BaseException):
            raise ending
        reason = "no schedule was found within 1 s"
        return SolveResult(
            problem=problem, status=Status.UNKNOWN, termination=ending, reason=reason
        )

    monkeypatch.setattr("poetmodel.solver.facade.execute", find_nothing)
    outcome = solve("--out", Path("x.json"), status=status)
    assert outcome.out == ""
    told(outcome.err)
    assert not Path("x.json").exists()
    printed = solve("--json")
    if status == 4:
        assert (printed.status, printed.json["status"]) == (4, "unknown")
        assert [printed.json[key] for key in FIGURES] == [None] * len(FIGURES)
        assert "R" not in printed.json


@pytest.mark.parametrize(
    ("options", "status"),
    [
        (("--ram", "350", "--method", "rotor"), 4),
        (("--method", "chen-sqrt", "--time-limit", "1e-6"), 4),
        (("--method", "mine.py:stop"), 4),
        (("--ram", "10", "--method", "rotor"), 3),
    ],
    ids=["does not apply", "time limit", "Ctrl-C", "infeasible"],
)
def test_methods_without_a_schedule_print_their_object(options, status, told):
    """Their reason is on stderr, and the object, alone, on stdout."""
    Path("mine.py").write_text("def stop(problem):\n    raise KeyboardInterrupt\n")
    outcome = solve(*options, "--json", status=status)
    told(outcome.err)
    assert outcome.json["status"] == ("infeasible" if status == 3 else "unknown")
    assert outcome.json["problem"]["method"] in options
    assert [outcome.json[key] for key in FIGURES] == [None] * len(FIGURES)
    assert solve(*options).out == ""


def test_status_is_that_of_the_command_wherever_ctrl_c_came():
    """Also inside of code that was made of text, after which ``python -m`` ends by the signal."""
    Path("mine.py").write_text("def stop(problem):\n    exec('raise KeyboardInterrupt')\n")
    command = ("solve", CHAIN, "--device", BOARD_FILE, "--ram", "350", "--method", "mine.py:stop")
    done = subprocess.run([sys.executable, "-m", "poetmodel", *command], check=False)
    assert done.returncode == 4


def test_ctrl_c_counts_where_python_ignores_exceptions():
    """Such as in a callback of a weak reference, which each import has."""
    Path("mine.py").write_text(
        "import signal, time, weakref\n"
        "def stop(problem):\n"
        "    held = type('Held', (), {})()\n"
        "    watched = weakref.ref(held, lambda _: signal.raise_signal(signal.SIGINT))\n"
        "    del held\n"
        "    for _ in range(600):\n"
        "        time.sleep(0.1)\n"
    )
    command = ("solve", CHAIN, "--device", BOARD_FILE, "--ram", "350", "--method", "mine.py:stop")
    done = subprocess.run(
        [sys.executable, "-m", "poetmodel", *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 4
    assert "Exception ignored" not in done.stderr


def test_time_taken_is_the_time_waited():
    """The table shows the wall time from the call to the answer, and that its parts add up."""
    text = " ".join(solve("--ram", "350").out.split())  # lines may break anywhere in the row
    row = re.search(r"time taken (\S+ \w+) (.*?); limit", text)
    assert row is not None, text
    parts = dict(re.findall(r"(\w+) ([\d.]+ \w+)", row[2]))
    assert "solving" in parts  # what takes less than a millisecond is not listed
    total = parse_time(row[1].replace(" ", ""), field="total")
    listed = sum(parse_time("".join(part.split()), field="part") for part in parts.values())
    assert listed == pytest.approx(total, abs=5e-3, rel=0.02)


def test_result_is_shown_even_if_the_file_cannot_be_written(monkeypatch, told):
    """A disk that fills up while solving costs the file, not the result."""

    def refuse(_result, path):
        msg = f"{path}: cannot be written (No space left on device)"
        raise InputError(msg)

    monkeypatch.setattr(SolveResult, "save", refuse)
    outcome = solve("--ram", "350", "--out", Path("x.json"), "--json", status=2)
    assert outcome.json["status"] == "optimal"
    told(outcome.err)


@pytest.mark.parametrize("formulation", ["lazy", "compact"])
def test_ctrl_c_keeps_and_writes_the_best_schedule(formulation):
    """On a terminal, the progress line runs; Ctrl-C ends the solve with its schedule, exit 0."""
    out = Path("x.schedule.json")
    terminal, stderr = pty.openpty()
    command = ("solve", "resnet18-cifar", "--device", "rpi4b", "--ram", "40%", "--gap", "0")
    process = subprocess.Popen(
        [sys.executable, "-m", "poetmodel", *command, "--formulation", formulation, "--out", out],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(stderr)
    seen = []

    def read():  # to the end: a terminal that nobody reads makes the process wait
        with suppress(OSError):
            while True:
                seen.append(os.read(terminal, 4096).decode())

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    try:
        assert wait_until(lambda: "bound" in "".join(seen) or process.poll() is not None)
        assert "energy overhead" in "".join(seen)
        process.send_signal(signal.SIGINT)
        table, _ = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        reading.join()
        os.close(terminal)
    assert process.returncode == 0
    assert "feasible" in table
    assert "interrupted" in table
    written = json.loads(out.read_text())
    assert written["status"] == "feasible"
    assert written["R"]


# -- counts of the table -------------------------------------------------------------------------
def graph():
    """Return a graph in which ``a`` is read at once and late, ``pair`` makes two tensors.

    Tensors: 0 a (10 B), 1 pair (3 B), 2 mask (4 B), 3 b (5 B), 4 last (1 B, never read).
    """
    pair = Node(
        name="pair",
        op="op",
        phase="forward",
        inputs=("a",),
        outputs=(Tensor(name="pair", bytes=3), Tensor(name="mask", bytes=4)),
    )
    return Graph(
        name="counts",
        nodes=(
            operation("a", output_bytes=10),
            pair,
            operation("b", output_bytes=5, inputs=("pair", "mask")),
            operation("last", output_bytes=1, inputs=("b", "a")),
        ),
    )


def told(schedule, of=None):
    """Return the rows about the executions of a schedule, by name."""
    known = of or graph()
    facts = decision_facts(known, schedule, simulate(known, None, schedule))
    return {fact.name: (fact.text, fact.note) for fact in facts}


def test_everything_kept_counts_tensors_with_readers():
    """Kept up to the last use: a, pair, mask, b, 22 B; not tensors without readers."""
    found = told(checkpoint_all(graph()))
    kept, size = found.pop("kept")
    assert kept == "4 tensors"
    assert size.startswith("22 B that stay in RAM")
    assert found == {
        "recomputed": ("nothing", "0 B of outputs"),
        "paged out": ("nothing", "0 B written"),
        "paged in": ("nothing", "0 B read"),
    }


def test_paged_and_recomputed_tensors_are_not_kept():
    """Computing a node again makes all its tensors anew; a paged tensor is not kept."""
    schedule = Schedule(
        R=((0, 0), (1, 1), (2, 2), (3, 1), (3, 3)), M_out=((0, 0),), M_in=((2, 0), (3, 0))
    )
    found = told(schedule)
    assert found["recomputed"] == ("once", "7 B of outputs")
    assert found["paged out"] == ("once", "10 B written")
    assert found["paged in"] == ("2 times", "20 B read")
    kept, size = found["kept"]
    assert kept == "1 tensor"
    assert size.startswith("5 B that stay in RAM")
