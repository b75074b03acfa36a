"""``poetmodel verify`` on plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kit.commands import BOARD_FILE, CHAIN, PROFILE, Outcome, invoke, write_solved
from kit.plans import plan
from poetmodel.device import Costs, Device
from poetmodel.graph import Graph
from poetmodel.plan import check_plan, encode
from poetmodel.schedule import GraphIdentity

if TYPE_CHECKING:
    from kit.messages import Told

PROGRAM = "c0 o0 c1 c2 w0 f0 c3 c4 f1 f2 f3 i0 w0 c5 f0 f4"
"""`chain`, with x on storage from h2 on: its peak is at g2, 304 B."""


@pytest.fixture
def plan_file() -> Path:
    """Return the file of a plan of `chain`."""
    path = Path("chain.plan.json")
    graph = Graph.load(CHAIN)
    made = plan(
        PROGRAM,
        identity=GraphIdentity.of(graph),
        ram_budget_bytes=304,
        device=str(BOARD_FILE),
    )
    made.save(path, check_plan(graph, Costs.estimate(graph, Device.load(BOARD_FILE)), made))
    return path


def changed(path: Path, **changes: Any) -> Path:
    """Change keys of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return path


def verify(path: Path, graph: Path, *arguments: object) -> Outcome:
    """Run the command."""
    return invoke("verify", path, "--graph", graph, *arguments)


def test_storage_is_that_of_the_option(plan_file: Path) -> None:
    """A plan solved for another storage than the device's: x takes 100 B there."""
    small = BOARD_FILE.read_text().replace("aux_bytes = 1_000_000", "aux_bytes = 99")
    Path("small.toml").write_text(small)
    given = ("--device", "small.toml")
    less = verify(plan_file, CHAIN, *given, "--json")
    assert (less.status, less.json["violations"]) == (
        3,
        ["storage used 100 B is above the limit of 99 B"],
    )
    assert verify(plan_file, CHAIN, *given, "--aux", "100B").status == 0
    assert verify(plan_file, CHAIN, "--aux", "99").status == 3
    schedule = invoke("verify", write_solved("s.json"), "--graph", CHAIN, "--aux", "99")
    assert schedule.status == 2
    assert "states its own" in schedule.err
    assert verify(plan_file, CHAIN, "--aux", "much").status == 2


def test_valid_plan(plan_file: Path, told: Told) -> None:
    """Exit 0, and the figures of the walk."""
    done = verify(plan_file, CHAIN)
    assert done.status == 0, done.out
    told(done.out)
    told(done.err, "then")
    found = verify(plan_file, CHAIN, "--json").json
    stated = json.loads(plan_file.read_text())
    assert (found["valid"], found["violations"]) == (True, [])
    for key in ("makespan_s", "stall_s", "compute_s", "transfer_s", "energy_j", "peak_ram_bytes"):
        assert found[key] == stated[key]
    assert found["makespan_s"] == pytest.approx(6.002)  # page-out beside h1, page-in is stall
    assert found["mode"] == "dma"


def test_broken_program_is_not_valid(plan_file: Path, told: Told) -> None:
    """Leaving a wait out is told, with exit 3."""
    program = json.loads(plan_file.read_text())["program"]
    del program[12]
    done = verify(changed(plan_file, program=program), CHAIN)
    assert done.status == 3
    told(done.verdict)


@pytest.mark.parametrize(
    "change",
    [
        {"ram_budget_bytes": 303},
        {"makespan_s": 6.0},
        {"peak_ram_bytes": 305},
    ],
)
def test_limits_and_stated_figures_are_checked(
    plan_file: Path, change: dict[str, Any], told: Told
) -> None:
    """The budget holds, and what a file claims must be so."""
    done = verify(changed(plan_file, **change), CHAIN)
    assert done.status == 3
    told(done.verdict)


def test_without_costs_memory_is_checked(plan_file: Path, told: Told) -> None:
    """A device that is not here leaves times unchecked, and says so."""
    changed(plan_file, device="elsewhere", makespan_s=1.0)
    done = verify(plan_file, CHAIN, "--json")
    assert done.status == 0
    assert done.json["makespan_s"] is None
    assert done.json["peak_ram_bytes"] == 304
    told(done.err)


def test_profile_gives_costs(plan_file: Path) -> None:
    """Other costs give other times: 1 s a transfer, so that the file's own are wrong."""
    done = verify(plan_file, CHAIN, "--profile", PROFILE, "--json")
    assert done.status == 3
    assert done.json["makespan_s"] == 7.0


def test_coded_plan(plan_file: Path) -> None:
    """Bytes are judged as the file that they stand for."""
    graph = Graph.load(CHAIN)
    data = encode(graph, plan(PROGRAM, device=str(BOARD_FILE)))
    plan_file.write_bytes(data)
    done = verify(plan_file, CHAIN, "--json")
    assert done.status == 0, done.err
    assert done.json["peak_ram_bytes"] == 304
    assert "states no RAM budget" in done.err
    plan_file.write_bytes(data[:-3])
    cut = verify(plan_file, CHAIN)
    assert (cut.status, f"{plan_file}: the coded plan is cut off" in cut.err) == (2, True)
    plan_file.write_bytes(data)
    assert verify(plan_file, "mlp").status == 2  # type: ignore[arg-type]


def test_unreadable_plans(plan_file: Path, told: Told) -> None:
    """Unknown keys, other graphs, other names and broken JSON: exit 2, naming the file."""
    text = plan_file.read_text()
    for key, value in (("extra", 1), ("nodes", list("abcdef")), ("tensors", list("abcdef"))):
        done = verify(changed(plan_file, **{key: value}), CHAIN)
        assert done.status == 2
        told(done.err, key)
        plan_file.write_text(text)
    assert verify(plan_file, "mlp").status == 2  # type: ignore[arg-type]
    plan_file.write_text(text[:40])
    told(verify(plan_file, CHAIN).err, "cut off")


def test_name_of_the_format_elsewhere_makes_no_plan() -> None:
    """A schedule file that holds the word is still a schedule file."""
    path = Path("x.json")
    path.write_text('{"format": "poetmodel-schedule", "device": "poetmodel-plan"}')
    done = verify(path, CHAIN)
    assert (done.status, "R: " in done.err or "nodes: missing" in done.err) == (2, True)
