"""Snapshots for memory_viz: its own functions read them, and their history is the plan's RAM."""

from __future__ import annotations

import pickle
import pickletools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from kit.instances import seeded
from kit.plans import PAGED, plan, random_plan, random_state_plan, state_step
from kit.worked import even_costs, skip_graph
from poetmodel.errors import PlanError
from poetmodel.placement import place
from poetmodel.plan import check_arena, check_plan, memory_snapshot
from poetmodel.plan.snapshot import encode_snapshot

if TYPE_CHECKING:
    from poetmodel.device import Costs
    from poetmodel.graph import Graph
    from poetmodel.plan import Plan, PlanCheck

READ_BY_THE_PAGE = {
    *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET"),
    *("EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_LIST", "APPEND", "APPENDS"),
    *("EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "TUPLE", "NONE", "NEWTRUE", "NEWFALSE"),
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE"),
}
"""The opcodes of pickles that the script of the page knows."""


def snapshot_of(graph: Graph, costs: Costs | None, made: Plan) -> tuple[Any, PlanCheck]:
    """Return the snapshot of a plan, read back from its bytes, and the simulation."""
    check = check_plan(graph, costs, made)
    assert check.violations == ()
    coded = encode_snapshot(memory_snapshot(graph, made, check, place(graph, made)))
    assert coded == encode_snapshot(memory_snapshot(graph, made, check, place(graph, made)))
    return pickle.loads(coded), check  # noqa: S301 - our own bytes


def skip_snapshot() -> tuple[Any, PlanCheck]:
    """Return the snapshot of the plan of `skip_graph` that pages a."""
    graph = skip_graph(workspace=True)
    costs = even_costs(graph, page_in=(7.0, 0.5), page_out=(5.0, 0.25))
    return snapshot_of(graph, costs, plan(PAGED, ram_budget_bytes=13, device="board"))


def allocated(trace: list[dict[str, Any]]) -> list[int]:
    """Return the bytes allocated after each entry, as the page adds them up.

    What is allocated together does not overlap, and what is freed was allocated as it is freed.
    """
    live: dict[int, int] = {}
    levels = []
    for entry in trace:
        begin, end = entry["addr"], entry["addr"] + entry["size"]
        if entry["action"] == "alloc":
            assert all(end <= at or at + size <= begin for at, size in live.items())
            live[begin] = entry["size"]
        elif entry["action"] == "free_completed":
            assert live.pop(begin) == entry["size"]
        levels.append(sum(live.values()))
    return levels


def test_history_of_a_plan() -> None:
    """Each copy and workspace is allocated and freed; frames say what, by which instruction."""
    (trace,) = skip_snapshot()[0]["device_traces"]
    frames = [
        [f"{f['filename']}:{f['line']}:{f['name']}" for f in entry["frames"]]
        for entry in trace
        if entry["action"] == "alloc"
    ]
    assert frames == [
        ["tensor:0:a", "program:0:compute a"],
        ["tensor:1:b", "program:2:compute b"],
        ["workspace:1:b", "program:2:compute b"],
        ["tensor:2:c", "program:5:compute c"],
        ["tensor:0:a", "program:7:page in a"],
        ["tensor:3:d", "program:9:compute d"],
    ]
    times = [entry["time_us"] for entry in trace if entry["action"] == "alloc"]
    assert times == [0, 1_000_000, 1_000_000, 6_000_000, 9_000_000, 16_000_000]
    assert {entry.get("category") for entry in trace} == {
        *(None, "activation", "workspace", "unknown")
    }


@pytest.mark.parametrize("mode", ["blocking", "dma"])
@pytest.mark.parametrize("with_state", [False, True], ids=["no state", "state"])
def test_allocated_bytes_are_the_plan_checkers(mode: str, *, with_state: bool) -> None:
    """Their highest is the peak, and after the entries of an instruction they are its RAM."""
    shared = 0
    for seed in range(40):
        rng = seeded(f"snapshot/{mode}/{with_state}/{seed}")
        graph, costs, made = random_state_plan(rng, mode) if with_state else random_plan(rng, mode)
        snapshot, check = snapshot_of(graph, costs, made)
        (trace,) = snapshot["device_traces"]
        levels = allocated(trace)
        assert max(levels) == check.peak_ram_bytes
        of_program = [entry["frames"][-1]["line"] if entry["frames"] else None for entry in trace]
        for position, moment in enumerate(check.moments):
            found = [at for line, at in zip(of_program, levels, strict=True) if line == position]
            if found:
                assert (max(found), found[-1]) == (moment.high_bytes, moment.ram_bytes)
        shared += any(
            "the rest" in entry["frames"][0]["name"] for entry in trace if entry["frames"]
        )
    assert (shared > 3) == with_state


def test_addresses_are_those_of_the_arena() -> None:
    """The segment is the block; allocations are where the arena has what they are of."""
    rng = seeded("snapshot/addresses")
    graph, costs, made = random_state_plan(rng, "blocking")
    arena = place(graph, made)
    snapshot = memory_snapshot(graph, made, check_plan(graph, costs, made), arena)
    (segment,) = snapshot["segments"]
    assert (segment["address"], segment["total_size"]) == (0, arena.bytes)
    (trace,) = snapshot["device_traces"]
    rectangles = {(one.offset, one.bytes) for one in check_arena(graph, made, arena).rectangles}
    own = [e for e in trace if e["action"] == "alloc" and "rest" not in e["frames"][0]["name"]]
    assert own
    assert {(e["addr"], e["size"]) for e in own} <= rectangles


def test_an_arena_of_another_plan_is_refused() -> None:
    """What has no offset is named."""
    graph, made = skip_graph(), plan(PAGED)
    arena = place(graph, made)
    check = check_plan(graph, None, made)
    with pytest.raises(PlanError, match="output 'd' of instruction 9 has no offset"):
        memory_snapshot(graph, made, check, replace(arena, offsets=arena.offsets[:-1]))


def test_the_page_knows_every_opcode() -> None:
    """Its script reads a part of the pickle format only, of versions 2 to 4."""
    graph, made = state_step(), plan("c0 c1 c2 f0 c3 c4 f2 c5 f4", "blocking", resident=(1, 3))
    coded = encode_snapshot(
        memory_snapshot(graph, made, check_plan(graph, None, made), place(graph, made))
    )
    codes = list(pickletools.genops(coded))
    assert {code.name for code, *_ in codes} <= READ_BY_THE_PAGE
    assert codes[0][1] in {2, 3, 4}


def test_there_is_an_unknown_category() -> None:
    """Where there are categories and none is ``unknown``, the script of the page stops."""
    last = skip_snapshot()[0]["device_traces"][0][-1]
    assert (last["action"], last["category"]) == ("snapshot", "unknown")


@pytest.mark.torch
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.seeds) for seed in range(1, 6))]
)
def test_pytorchs_own_functions_read_it(seed: int) -> None:
    """Summary, history, flame graphs and pages of `torch.cuda._memory_viz` are made of it."""
    pytest.importorskip("torch")
    from torch.cuda import _memory_viz as viz

    rng = seeded(f"snapshot/viz/{seed}")
    graph, costs, made = random_state_plan(rng, "dma")
    snapshot, check = snapshot_of(graph, costs, made)
    (segment,), (trace,) = snapshot["segments"], snapshot["device_traces"]
    summary = viz.segsum(snapshot)  # it checks that blocks fill their segments
    assert f"total_reserved: {viz.Bytes(segment['total_size'])}\n" in summary
    left = sum(b["requested_size"] for b in segment["blocks"])
    assert left == check.moments[-1].ram_bytes
    assert f"total_allocated: {viz.Bytes(left)}\n" in summary
    said = viz.trace(snapshot)
    assert said.count(" = a[") == sum(entry["action"] == "alloc" for entry in trace)
    assert said.count("del ") == sum(entry["action"] == "free_requested" for entry in trace)
    flames = viz.memory(snapshot, format_flamegraph=str)
    for block in segment["blocks"]:
        if block["state"] == "active_allocated":
            assert f"{block['frames'][0]['name']} {block['requested_size']}\n" in flames
    assert viz.compare([], snapshot["segments"], format_flamegraph=str)
    for page in (viz.trace_plot(snapshot), viz.segment_plot(snapshot)):
        assert "snapshot.pickle" in page
    alive = viz.filter_alloc_free_pairs(snapshot)["device_traces"][0]
    assert sum(e["size"] for e in alive if e["action"] == "alloc") == left
