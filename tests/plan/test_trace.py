"""Trace events: strictly valid, and the plan checker's times and RAM, event by event."""

import json

import pytest

from kit.instances import make_rng
from kit.plans import PAGED, parse_plan, random_plan, random_state_plan
from kit.trace_events import check_trace, to_nanoseconds
from kit.worked import even_costs, skip_graph
from poetmodel.device.ram import KIND_NAMES
from poetmodel.plan import Op, check_plan, trace_events
from poetmodel.plan.trace import BUS, CORE, trace_text


def made_of(graph, costs, made):
    """Return the events of a plan, read back from their text and checked, and the simulation."""
    check = check_plan(graph, costs, made)
    assert check.violations == ()
    text = trace_text(trace_events(graph, made, check))
    assert text == trace_text(trace_events(graph, made, check))
    return check_trace(json.loads(text)), check


def skip_events(mode="dma"):
    """Return the events of the plan of `skip_graph` that pages a."""
    graph = skip_graph(workspace=True)
    costs = even_costs(graph, page_in=(7.0, 0.5), page_out=(5.0, 0.25))
    made = parse_plan(PAGED, mode, ram_budget_bytes=13, device="board")
    return made_of(graph, costs, made)


def slices(events, track):
    """Return name, category, begin and length [s] of the slices of a track."""
    return [
        (e["name"], e["cat"], e["ts"] / 1e6, e["dur"] / 1e6)
        for e in events
        if e["ph"] == "X" and e["tid"] == track
    ]


def test_slices_of_a_plan():
    """Computations and stalls on the core, transfers on the bus, as worked out by hand."""
    events, check = skip_events()
    assert slices(events, CORE) == [
        ("a", "compute", 0, 1),
        ("b", "compute", 1, 2),
        ("stall a", "stall", 3, 3),
        ("c", "compute", 6, 3),
        ("stall a", "stall", 9, 7),
        ("d", "compute", 16, 4),
    ]
    assert slices(events, BUS) == [("page out a", "page_out", 1, 5), ("page in a", "page_in", 9, 7)]
    begin, end = (e for e in events if e["ph"] in "sf")
    assert (begin["name"], begin["ts"], end["ts"]) == ("a on storage", 1e6, 9e6)
    (peak,) = (e for e in events if e["ph"] == "i")
    record = check.records[check.peak_position or 0]
    assert (peak["ts"], peak["args"]) == (record.issued_s * 1e6, {"ram_bytes": record.peak_bytes})
    (b,) = (e for e in events if e["name"] == "b")
    assert b["args"] == {
        "instruction": 2,
        "node": "b",
        "op": skip_graph().nodes[1].op,
        "phase": str(skip_graph().nodes[1].phase),
        "outputs": {"b": 6},
        "workspace_bytes": 1,
        "ram_bytes": 11,
        "ram_after_bytes": 10,
    }


def test_names_and_figures_of_a_plan():
    """The process is the graph on its device; the figures of the plan are beside the events."""
    graph = skip_graph()
    costs = even_costs(graph, page_in=(7.0, 0.5), page_out=(5.0, 0.25))
    made = parse_plan(PAGED, ram_budget_bytes=12, device="board")
    check = check_plan(graph, costs, made)
    document = trace_events(graph, made, check)
    names = [e["args"]["name"] for e in document["traceEvents"] if e["name"].endswith("_name")]
    assert names == ["skip on board", "core", "bus"]
    figures = document["otherData"]
    assert (figures["graph"], figures["device"], figures["mode"]) == ("skip", "board", "dma")
    for key in ("peak_ram_bytes", "makespan_s", "stall_s", "energy_j"):
        assert figures[key] == getattr(check, key)
    budgets = [e for e in document["traceEvents"] if e["name"] == "RAM budget"]
    assert [(e["ts"], e["args"]) for e in budgets] == [(0, {"bytes": 12}), (20e6, {"bytes": 12})]


def test_blocking_transfers_leave_the_core_idle():
    """They are on the bus alone; the next computation begins when they end."""
    events, _ = skip_events("blocking")
    core, bus = slices(events, CORE), slices(events, BUS)
    assert [name for name, *_ in core] == ["a", "b", "c", "d"]
    assert core[1][2] == bus[0][2] + bus[0][3] == 6


@pytest.mark.parametrize("mode", ["blocking", "dma"])
@pytest.mark.parametrize("with_state", [False, True], ids=["no state", "state"])
def test_events_are_the_plan_checkers(mode, *, with_state):
    """Slices have the times of all that acts, counters the RAM during and after everything."""
    seen = dict.fromkeys(("flows", "stalls", "state"), 0)
    for seed in range(40):
        rng = make_rng(f"trace/{mode}/{with_state}/{seed}")
        graph, costs, made = random_state_plan(rng, mode) if with_state else random_plan(rng, mode)
        events, check = made_of(graph, costs, made)
        check_slices(events, check, made, graph)
        check_counters(events, check)
        seen["flows"] += any(e["ph"] == "s" for e in events)
        seen["stalls"] += any(e.get("cat") == "stall" for e in events)
        seen["state"] += any(e["args"].get("state") for e in events if e["ph"] == "C")
    assert seen["flows"] > 5
    assert (seen["stalls"] > 5) == (mode == "dma")
    assert (seen["state"] > 5) == with_state


def check_slices(events, check, made, graph):
    """Compare the slices with the records of all instructions on a track."""
    by_position = {e["args"]["instruction"]: e for e in events if e["ph"] == "X"}
    reads = made.first_reads(graph)
    for position, (step, record) in enumerate(zip(made.program, check.records, strict=True)):
        held = step.op == Op.COMPUTE and graph.nodes[step.index].is_state
        waits = step.op == Op.WAIT and record.end_s == record.start_s
        if step.op == Op.FREE or waits or (held and step.index not in reads):
            assert position not in by_position
            continue
        event = by_position.pop(position)
        moves = step.op in {Op.PAGE_IN, Op.PAGE_OUT} or (held and step.index in reads)
        assert event["tid"] == (BUS if moves else CORE)
        begin = to_nanoseconds(event["ts"])
        end = begin + to_nanoseconds(event["dur"])
        assert (begin, end) == (round(record.start_s * 1e9), round(record.end_s * 1e9))
        args = event["args"]
        assert (args["ram_bytes"], args["ram_after_bytes"]) == (record.peak_bytes, record.ram_bytes)
    assert by_position == {}


def check_counters(events, check):
    """Compare the counters with the simulated RAM at each of its changes."""
    counted = [e for e in events if e["ph"] == "C" and e["name"] != "RAM budget"]
    ram = [(to_nanoseconds(e["ts"]), e["args"]["bytes"]) for e in counted if e["name"] == "RAM"]
    kinds = [e for e in counted if e["name"] == "RAM by kind"]
    assert [tuple(e["args"]) for e in kinds] == [KIND_NAMES] * len(kinds)
    assert [(to_nanoseconds(e["ts"]), sum(e["args"].values())) for e in kinds] == ram
    clocks = [record.issued_s for record in check.records]
    clocks += [check.records[-1].end_s]
    levels = []
    for record, after_s in zip(check.records, clocks[1:], strict=True):
        levels.append((round(record.issued_s * 1e9), record.peak_bytes))
        levels.append((round(after_s * 1e9), record.ram_bytes))
    assert changes(ram) == changes(levels)
    assert max(level for _, level in ram) == check.peak_ram_bytes


def changes(levels):
    """Return the levels that differ from the one before."""
    return [
        now for before, now in zip([(0, -1), *levels], levels, strict=False) if now[1] != before[1]
    ]
