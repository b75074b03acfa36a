"""Plans: the program, its file and its listing."""

import json

import pytest

from kit.plans import PAGED, parse_plan, state_step
from kit.worked import even_costs, make_state_node, make_update_node, skip_graph
from poetmodel.device import StorageMode
from poetmodel.errors import PlanError
from poetmodel.graph import Graph, operation
from poetmodel.placement import place
from poetmodel.plan import Instruction, Op, Plan, check_plan
from poetmodel.plan.derivation import add_waits_and_frees
from poetmodel.plan.document import load_document
from poetmodel.plan.listing import plan_listing
from poetmodel.schedule import GraphIdentity
from poetmodel.schedule.homes import Homes
from poetmodel.schedule.metrics import Display, simulated_metrics
from poetmodel.schedule.relations import format_document
from poetmodel.units import ESTIMATES

SKIP = Homes.from_resident(skip_graph())


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ("c0 c1 c2 c3", "c0 c1 c2 f1 c3 f0 f2 f3"),  # frees follow last uses
        # A page-out is waited for at the last use, or at the wait given.
        ("c0 o0 c1 c2 i0 c3", "c0 o0 c1 w0 f0 c2 f1 i0 w0 c3 f0 f2 f3"),
        ("c0 o0 c1 c2 w0 i0 c3", "c0 o0 c1 c2 f1 w0 f0 i0 w0 c3 f0 f2 f3"),
        ("c0 c1 c0 c2 c3", "c0 c1 f0 c0 c2 f1 c3 f0 f2 f3"),  # an old copy goes before a new one
        # A second page-out waits for the first.
        ("c0 o0 o0 c1 c2 c3", "c0 o0 w0 o0 c1 c2 f1 c3 w0 f0 f2 f3"),
        # What nothing reads goes at once.
        ("c0 o0 c1 i0 i0 c2 c3", "c0 o0 c1 w0 f0 i0 w0 f0 i0 c2 f1 w0 c3 f0 f2 f3"),
        # Later transfers follow the wait.
        ("c0 o0 c1 c2 i0 o2 c3", "c0 o0 c1 w0 f0 c2 f1 i0 w0 o2 c3 f0 w2 f2 f3"),
    ],
)
def test_programs_are_completed_by_the_rules(steps, expected):
    """Waits and frees of a DMA program are placed as in the docstring."""
    found = add_waits_and_frees(SKIP, parse_plan(steps).program, StorageMode.DMA)
    assert found == parse_plan(expected).program


def test_blocking_programs_have_no_waits():
    """Where transfers hold the core, waits are left out and frees stay."""
    found = add_waits_and_frees(
        SKIP, parse_plan("c0 o0 c1 c2 w0 i0 c3").program, StorageMode.BLOCKING
    )
    assert found == parse_plan("c0 o0 c1 f0 c2 f1 i0 c3 f0 f2 f3").program


def test_plain_values_become_instructions():
    """Pairs of a word and a number, and a mode by its name, are accepted; others are refused.

    Plans are equal if program, mode, budget and device are.
    """
    made = Plan(program=(("compute", 0), ["free", 1]), mode="dma")
    assert made.program == (Instruction(Op.COMPUTE, 0), Instruction(Op.FREE, 1))
    assert made.mode is StorageMode.DMA
    for words in ({"program": (("run", 0),)}, {"mode": "slow"}):
        with pytest.raises(ValueError, match="is not a valid"):
            Plan(**{"program": (), "mode": "dma", **words})

    assert parse_plan(PAGED) == parse_plan(PAGED)
    assert parse_plan(PAGED) != parse_plan(PAGED, "blocking")
    assert parse_plan(PAGED) != parse_plan(PAGED, ram_budget_bytes=12)


# -- files ---------------------------------------------------------------------------------------
def made():
    """Return a plan with all fields."""
    identity = GraphIdentity.from_graph(skip_graph())
    return parse_plan(PAGED, identity=identity, ram_budget_bytes=12, device="board")


def document(**changes):
    """Return the content of its file, changed."""
    graph = skip_graph()
    found = made().to_dict(check_plan(graph, even_costs(graph), made()))
    return {key: value for key, value in (found | changes).items() if value is not ...}


def test_file_has_the_keys_of_the_contract():
    """All keys, in order, with the simulator's figures."""
    found = document()
    assert list(found) == [
        *("format", "version", "written_by", "graph", "device", "mode", "ram_budget_bytes"),
        *(
            "nodes",
            "tensors",
            "program",
            "costs",
            "makespan_s",
            "stall_s",
            "transfer_s",
            "compute_s",
            "energy_j",
        ),
        "peak_ram_bytes",
    ]
    assert found["format"] == "poetmodel-plan"
    assert found["graph"] == {"name": "skip", "sha256": skip_graph().sha256}
    assert found["program"][:3] == [["compute", 0], ["page_out", 0], ["compute", 1]]
    # Page-out and page-in take 1 s; the first runs beside b, the second is stall.
    assert (found["makespan_s"], found["stall_s"], found["peak_ram_bytes"]) == (11.0, 1.0, 12)
    assert json.loads(format_document(found)) == found


def test_saved_plan_is_loaded_again(tmp_path):
    """Program, mode, budget, device and identity are read back, with and without metrics.

    A file must name its graph.
    """
    graph, path = skip_graph(), tmp_path / "skip.plan.json"
    check = check_plan(graph, even_costs(graph), made())
    made().save(path, check)
    assert Plan.load(path) == made()
    read = load_document(path)
    assert read.plan.identity == made().identity
    assert read.stated_metrics == simulated_metrics(Display.PLAN_FILE, check)
    made().save(path)
    assert Plan.load(path) == made()
    assert set(load_document(path).stated_metrics.values()) == {None}
    with pytest.raises(PlanError, match="names no graph"):
        parse_plan(PAGED).save(tmp_path / "x.plan.json")


def test_homes_are_saved_in_version_2(tmp_path):
    """The file lists resident tensors, even if none, and whether storage is memory-mapped."""
    path = tmp_path / "step.plan.json"
    for keys in ({"resident": ()}, {"resident": (3, 1)}, {"resident": (1,), "memory_mapped": True}):
        case = parse_plan("c0", "blocking", identity=GraphIdentity.from_graph(state_step()), **keys)
        found = case.to_dict()
        assert (found["version"], found["resident"]) == (2, sorted(keys["resident"]))
        assert found.get("memory_mapped") == keys.get("memory_mapped")
        case.save(path)
        assert Plan.load(path) == case


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"arena": {"room": 1}}, "arena.bytes: missing"),
        ({"written_by": 1}, "written_by: expected a valid string"),
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
    """The message names the file, the key and the accepted values."""
    with pytest.raises(PlanError) as caught:
        load_document("skip.plan.json", json.dumps(document(**change)).encode())
    assert all(fault.startswith("skip.plan.json: ") for fault in caught.value.faults)
    assert any(words in fault for fault in caught.value.faults), caught.value.faults


# -- listing -------------------------------------------------------------------------------------
def pair_step():
    """Return x, w, y = f(x, w) in place of x, v, w+ = u(w, y)."""
    return Graph(
        name="step",
        nodes=(
            operation("x", output_bytes=10),
            make_state_node("w", 8),
            operation("y", output_bytes=6, inputs=("x", "w"), in_place={"y": "x"}),
            make_state_node("v", 3),
            make_update_node("u", "y", w=8),
        ),
    )


def listed(text, mode="dma"):
    """Return the lines of the listing of a program of `skip_graph`."""
    graph = skip_graph()
    made = parse_plan(text, mode, ram_budget_bytes=12, device="board")
    costs = even_costs(graph, page_in=(7.0, 0.5), page_out=(5.0, 0.25))
    return plan_listing(graph, made, check_plan(graph, costs, made)).splitlines()


def test_listing_of_a_plan():
    """Time, RAM, stalls, sizes and the peak, worked out by hand."""
    assert listed(PAGED) == [
        f"Plan for skip on board, dma transfers: 12 instructions, 4 nodes ({ESTIMATES})",
        "  time    20 s: compute 10 s, transfers 12 s, stall 10 s",
        "  energy  10.75 J",
        "  RAM     peak 12 B at instruction 9, of a budget of 12 B",
        "",
        "        #   time [ms]    RAM after",
        "        0       0.000          4 B  compute    a  takes 1 s",
        "        1   1,000.000          4 B  page out   a  4 B beside the core in 5 s",
        "        2   1,000.000         10 B  compute    b  takes 2 s",
        "  !     3   3,000.000         10 B  wait for   a  STALL 3 s",
        "        4   6,000.000          6 B  free       a  frees 4 B",
        "        5   6,000.000         11 B  compute    c  takes 3 s",
        "        6   9,000.000          5 B  free       b  frees 6 B",
        "        7   9,000.000          9 B  page in    a  4 B beside the core in 7 s",
        "  !     8   9,000.000          9 B  wait for   a  STALL 7 s",
        "        9  16,000.000         12 B  compute    d  takes 4 s  <- peak 12 B",
        "       10  20,000.000          8 B  free       a  frees 4 B",
        "       11  20,000.000          3 B  free       c  frees 5 B",
    ]


def test_recomputations_and_waits_for_the_bus_are_told():
    """The listing marks recomputations; a transfer behind another states its wait.

    Violations of a plan follow below.
    """
    lines = listed("c0 o0 c1 o1 c2 w1 f1 w0 f0 c0 c3 f0 f2")
    assert "recompute  a  takes 1 s" in lines[15]
    assert "page out   b  6 B beside the core in 5 s, after 3 s for the bus" in lines[9]
    assert "wait for   a  done already" in lines[13]
    assert lines[13].startswith("    ")
    lines = listed("c0 f9 c1 c2")
    assert "not valid:" in lines
    assert "  instruction 1, free 9: the graph has no such index" in lines
    lines = listed("c0 c7 c1 c2")
    assert any("number 7" in line and line.rstrip().endswith("?") for line in lines)


def test_state_and_operators_in_place_are_told():
    """Reads from storage, writes to it, state in RAM, and overwritten inputs are listed."""
    graph = pair_step()
    made = parse_plan("c0 c1 c2 f0 c3 c4 f2 o4 f4", "blocking", resident=(3,))
    lines = plan_listing(graph, made, check_plan(graph, None, made)).splitlines()
    assert lines[2] == "  state   1 tensor of 3 B resident, 1 tensor of 8 B on storage"
    words = [line.split(" B  ", 1)[1] for line in lines[5:]]
    assert words == [
        "compute    x   takes 0 s",
        "read       w   from storage, 8 B in 0 s  <- peak 21 B",
        "compute    y   takes 0 s, y in place of x",
        "free       x   frees 10 B",
        "hold       v   3 B, resident",
        "compute    u   takes 0 s",
        "free       y   frees 6 B",
        "page out   w+  writes w back, 8 B in 0 s",
        "free       w+  frees 8 B",
    ]


def test_listing_with_addresses():
    """Each computed or resident tensor has its offset, by name if a node makes several."""
    graph = pair_step()
    made = parse_plan("c0 c1 c2 f0 c3 c4 f2", "blocking", resident=(1, 3))
    arena = place(graph, made, alignment=4)
    check = check_plan(graph, None, made)
    lines = plan_listing(graph, made, check, arena).splitlines()
    assert "  arena   24 B, lower bound 24 B, fragmentation 0.00%" in lines
    assert [line.partition("  x  ")[2] for line in lines if " compute    x" in line] == [
        "takes 0 s, at 12  <- peak 21 B"
    ]
    assert any(line.endswith("w  8 B, resident, at 0") for line in lines)
    assert any(line.endswith("y in place of x, at 12") for line in lines)
    graph, made = skip_graph(mask=True, workspace=True), parse_plan("c0 c1 c2 f1 c3 f0 f2 f3")
    check = check_plan(graph, even_costs(graph), made)
    lines = plan_listing(graph, made, check, place(graph, made)).splitlines()
    assert any("takes 2 s, b at " in line and ", workspace at " in line for line in lines)
    assert any("takes 3 s, c at " in line and ", c.mask at " in line for line in lines)
