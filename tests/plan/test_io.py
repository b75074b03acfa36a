"""Plan files: what is written is read again, and what is wrong is reported."""

import json

import pytest

from kit.plans import PAGED, plan, state_step
from kit.worked import even_costs, skip_graph
from poetmodel.errors import PlanError
from poetmodel.plan import Plan, check_plan
from poetmodel.plan.io import load_document, parse_document
from poetmodel.plan.program import STATED
from poetmodel.schedule import GraphIdentity
from poetmodel.schedule.relations import dump


def made():
    """Return a plan that says all about itself."""
    identity = GraphIdentity.of(skip_graph())
    return plan(PAGED, identity=identity, ram_budget_bytes=12, device="board")


def document(**changes):
    """Return the content of its file, changed."""
    graph = skip_graph()
    found = made().to_dict(check_plan(graph, even_costs(graph), made()))
    return {key: value for key, value in (found | changes).items() if value is not ...}


def test_file_has_the_keys_of_the_contract():
    """All keys, in order, with the simulator's figures."""
    found = document()
    assert list(found) == [
        *("format", "version", "graph", "device", "mode", "ram_budget_bytes", "nodes", "tensors"),
        *("program", "makespan_s", "stall_s", "transfer_s", "compute_s", "energy_j"),
        "peak_ram_bytes",
    ]
    assert found["format"] == "poetmodel-plan"
    assert found["graph"] == {"name": "skip", "sha256": skip_graph().sha256}
    assert found["program"][:3] == [["compute", 0], ["page_out", 0], ["compute", 1]]
    # Page-out and page-in take 1 s; the first runs beside b, the second is stall.
    assert (found["makespan_s"], found["stall_s"], found["peak_ram_bytes"]) == (11.0, 1.0, 12)
    assert json.loads(dump(found)) == found


def test_saved_plan_is_loaded_again(tmp_path):
    """Program, mode, budget, device and identity come back, with and without figures.

    A file must name its graph.
    """
    graph, path = skip_graph(), tmp_path / "skip.plan.json"
    check = check_plan(graph, even_costs(graph), made())
    made().save(path, check)
    assert Plan.load(path) == made()
    read = load_document(path)
    assert read.plan.identity == made().identity
    assert read.stated == {key: getattr(check, key) for key in STATED}
    made().save(path)
    assert Plan.load(path) == made()
    assert set(load_document(path).stated.values()) == {None}
    with pytest.raises(PlanError, match="names no graph"):
        plan(PAGED).save(tmp_path / "x.plan.json")


def test_homes_are_saved_in_version_2(tmp_path):
    """The file lists what is resident, none too, and says where storage is memory-mapped."""
    path = tmp_path / "step.plan.json"
    for keys in ({"resident": ()}, {"resident": (3, 1)}, {"resident": (1,), "memory_mapped": True}):
        case = plan("c0", "blocking", identity=GraphIdentity.of(state_step()), **keys)
        found = case.to_dict()
        assert (found["version"], found["resident"]) == (2, sorted(keys["resident"]))
        assert found.get("memory_mapped") == keys.get("memory_mapped")
        case.save(path)
        assert Plan.load(path) == case


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"makespan": 1.0}, "makespan: unknown key; accepted are the keys of a plan file"),
        ({"nodes": ...}, "nodes: missing"),
        ({"format": "poetmodel-schedule"}, "format: expected 'poetmodel-plan'"),
        ({"version": 3}, "version: expected 1 or 2, got 3"),
        ({"version": 2}, "resident: a file of version 2 lists the state whose home is RAM"),
        ({"resident": []}, "one of version 1 does not"),
        ({"version": 2, "resident": [4]}, "resident[0]: expected the number of one of the 4"),
        ({"memory_mapped": True}, "memory_mapped: expected in a file of version 2 only"),
        ({"version": True}, "version: expected 1 or 2"),
        ({"mode": "fast"}, "mode: expected 'blocking' or 'dma', got 'fast'"),
        ({"ram_budget_bytes": 0}, "ram_budget_bytes"),
        ({"stall_s": "none"}, "stall_s"),
        ({"graph": {"name": "skip", "sha256": "12"}}, "graph.sha256"),
        ({"program": [["compute", 4]]}, "program[0][1]: expected the number of one of the 4 nodes"),
        ({"program": [["free", 4]]}, "program[0][1]: expected the number of one of the 4 tensors"),
        ({"program": [["compute", -1]]}, "program[0][1]"),
        ({"program": [["compute", True]]}, "program[0][1]"),
        ({"program": [["compute", 1.0]]}, "program[0][1]"),
        ({"program": [["compute"]]}, "program[0]: expected a list of an operation and an index"),
        ({"program": [["fetch", 0]]}, "program[0][0]"),
        ({"program": {}}, "program"),
    ],
)
def test_faults_are_told_with_file_and_place(change, words):
    """Whatever is wrong, the message names the file, the key and what would be accepted."""
    with pytest.raises(PlanError) as caught:
        parse_document(json.dumps(document(**change)), source="skip.plan.json")
    assert all(fault.startswith("skip.plan.json: ") for fault in caught.value.faults)
    assert any(words in fault for fault in caught.value.faults), caught.value.faults
