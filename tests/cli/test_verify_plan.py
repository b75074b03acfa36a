"""``poetmodel verify`` on plans."""

import json
from pathlib import Path

import pytest

from kit.commands import BOARD_FILE, CHAIN, PROFILE, invoke
from kit.plans import plan
from poetmodel.device import Costs, Device
from poetmodel.graph import Graph
from poetmodel.plan import check_plan
from poetmodel.schedule import GraphIdentity

PROGRAM = "c0 o0 c1 c2 w0 f0 c3 c4 f1 f2 f3 i0 w0 c5 f0 f4"
"""`chain`, with x on storage from h2 on: its peak is at g2, 304 B."""


@pytest.fixture
def plan_file():
    """Return the file of a plan of `chain`."""
    path = Path("chain.plan.json")
    graph = Graph.load(CHAIN)
    made = plan(
        PROGRAM, identity=GraphIdentity.of(graph), ram_budget_bytes=304, device=str(BOARD_FILE)
    )
    made.save(path, check_plan(graph, Costs.estimate(graph, Device.load(BOARD_FILE)), made))
    return path


def changed(path, **changes):
    """Change keys of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return path


def verify(path, graph, *arguments, **due):
    """Run the command."""
    return invoke("verify", path, "--graph", graph, *arguments, **due)


def test_storage_is_that_of_the_option(plan_file):
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
    assert verify(plan_file, CHAIN, "--aux", "much").status == 2


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (("--ram", "304", "--deadline", "6.1s"), None),
        (("--ram", "303"), "peak RAM 304 B is 1 B above the 303 B that tensors may use"),
        (("--deadline", "6s"), "makespan 6.002 s is above the deadline of 6 s"),
    ],
)
def test_given_limits_replace_those_of_the_plan(plan_file, limits, words):
    """A plan is held against RAM, storage and deadline; other limits are those of schedules."""
    found = verify(plan_file, CHAIN, *limits, "--json", status=3 if words else 0)
    assert all(words in fault for fault in found.json["violations"])
    assert len(found.json["violations"]) == bool(words)
    assert verify(plan_file, CHAIN, "--no-paging").status == 2


def test_valid_plan(plan_file, told):
    """Exit 0, and the figures of the walk."""
    done = verify(plan_file, CHAIN, status=0)
    told(done.out)
    told(done.err, "then")
    found = verify(plan_file, CHAIN, "--json").json
    stated = json.loads(plan_file.read_text())
    assert (found["valid"], found["violations"]) == (True, [])
    for key in ("makespan_s", "stall_s", "compute_s", "transfer_s", "energy_j", "peak_ram_bytes"):
        assert found[key] == stated[key]
    assert found["makespan_s"] == pytest.approx(6.002)  # page-out beside h1, page-in is stall
    assert found["mode"] == "dma"


@pytest.mark.parametrize(
    "change", [{"ram_budget_bytes": 303}, {"makespan_s": 6.0}, {"program": 12}]
)
def test_broken_programs_limits_and_figures_are_named(plan_file, change, told):
    """The budget holds, what a file claims must be so, and no wait may be left out."""
    if "program" in change:
        program = json.loads(plan_file.read_text())["program"]
        change = {"program": program[:12] + program[13:]}
    done = verify(changed(plan_file, **change), CHAIN, status=3)
    told(done.verdict)


def test_without_costs_memory_is_checked(plan_file, told):
    """Without costs times are not checked, which is said; other costs give other times."""
    changed(plan_file, device="elsewhere", makespan_s=1.0)
    done = verify(plan_file, CHAIN, "--json", status=0)
    assert done.json["makespan_s"] is None
    assert done.json["peak_ram_bytes"] == 304
    told(done.err)
    done = verify(plan_file, CHAIN, "--profile", PROFILE, "--json", status=3)
    assert done.json["makespan_s"] == 7.0


def test_unreadable_plans(plan_file, told):
    """Names not of the graph, another graph, a cut file: exit 2; the word elsewhere is no plan."""
    assert verify(plan_file, "mlp").status == 2
    told(verify(changed(plan_file, nodes=list("abcdef")), CHAIN, status=2).err)
    plan_file.write_text(plan_file.read_text()[:40])
    told(verify(plan_file, CHAIN).err, "cut off")
    path = Path("x.json")
    path.write_text('{"format": "poetmodel-schedule", "device": "poetmodel-plan"}')
    done = verify(path, CHAIN)
    assert (done.status, "R: " in done.err or "nodes: missing" in done.err) == (2, True)
