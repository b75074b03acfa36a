"""The command line with a graph of version 2: shown, and refused where nothing schedules it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from commands import invoke
from poetmodel.graph import Graph, operation
from poetmodel.plan import Plan
from poetmodel.schedule import GraphIdentity, checkpoint_all
from state_steps import state, update

if TYPE_CHECKING:
    from pathlib import Path

REFUSED = (
    "state tensors and in-place operators: those of graph 'step' are simulated, but no method "
    "schedules them yet"
)


@pytest.fixture
def step() -> Graph:
    """Return y = f(x, w) in place of x, and w+ = u(w, y)."""
    return Graph(
        name="step",
        nodes=(
            operation("x", output_bytes=1000),
            state("w", 800),
            operation("y", output_bytes=600, inputs=("x", "w"), in_place={"y": "x"}),
            update("u", "y", w=800),
        ),
    )


@pytest.fixture
def path(step: Graph, tmp_path: Path) -> Path:
    """Return its file."""
    file = tmp_path / "step.graph.json"
    step.save(file)
    return file


def test_inspect_shows_state(path: Path) -> None:
    """Keep-all has the state in RAM throughout, the minimum only where a step needs it."""
    facts = invoke("inspect", path, "--json").json
    assert facts["state_bytes"] == 800
    assert facts["checkpoint_all_peak_bytes"] == 1800
    assert (facts["floor_bytes"], facts["floor_node"]) == (1800, "y")
    out = " ".join(invoke("inspect", path).out.split())
    assert "state 800 B 1 tensors, 1 updated" in out


@pytest.mark.parametrize("command", ["solve", "limits"])
def test_methods_are_refused_in_a_sentence(command: str, path: Path) -> None:
    """Nothing is solved, and the status is that of bad input."""
    outcome = invoke(command, "--graph", path, "--device", "mkr1000", "--ram", "90%")
    assert outcome.status == 2, outcome.err
    assert REFUSED in outcome.err
    assert "Traceback" not in outcome.err
    assert outcome.out == ""


def test_sweep_refuses_them_too(path: Path, tmp_path: Path) -> None:
    """A run that cannot be stated is no result."""
    out = tmp_path / "runs.jsonl"
    outcome = invoke("sweep", path, "--devices", "mkr1000", "--ram", "90%", "--out", out)
    assert outcome.status == 2, outcome.err
    assert REFUSED in outcome.err


@pytest.mark.parametrize("command", ["verify", "plan", "explain", "report"])
def test_schedules_of_such_graphs_are_refused(
    command: str, step: Graph, path: Path, tmp_path: Path
) -> None:
    """A schedule that the library simulates is not verified, planned, explained or reported."""
    file = tmp_path / "step.schedule.json"
    checkpoint_all(step).save(file)
    out = ("--out", tmp_path / "report.html") if command == "report" else ()
    outcome = invoke(command, file, "--graph", path, "--device", "mkr1000", *out)
    assert outcome.status == 2, outcome.err
    assert REFUSED in outcome.err
    assert "Traceback" not in outcome.err


def test_plans_of_such_graphs_are_refused(step: Graph, path: Path, tmp_path: Path) -> None:
    """A program for one is not checked."""
    file = tmp_path / "step.plan.json"
    plan = Plan(program=(), mode="blocking", identity=GraphIdentity.of(step))  # type: ignore[arg-type]
    file.write_text(json.dumps(plan.to_dict()))
    outcome = invoke("verify", file, "--graph", path, "--device", "mkr1000")
    assert outcome.status == 2, outcome.err
    assert REFUSED in outcome.err
