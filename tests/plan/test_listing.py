"""The listing tells a plan line by line."""

from __future__ import annotations

from plan_words import PAGED, plan
from poetmodel.plan import check_plan
from poetmodel.plan.listing import plan_listing
from worked import even_costs, skip_graph


def listed(text: str, mode: str = "dma") -> list[str]:
    """Return the lines of the listing of a program of `skip_graph`."""
    graph = skip_graph()
    made = plan(text, mode, ram_budget_bytes=12, device="board")
    costs = even_costs(graph, page_in=(7.0, 0.5), page_out=(5.0, 0.25))
    return plan_listing(graph, made, check_plan(graph, costs, made)).splitlines()


def test_listing_of_a_plan() -> None:
    """Time, RAM, stalls, sizes and the peak, worked out by hand."""
    assert listed(PAGED) == [
        "Plan for skip on board, dma transfers: 12 instructions, 4 nodes",
        "  time    20 s: compute 10 s, transfers 12 s, stall 10 s",
        "  energy  10.75 J",
        "  RAM     peak 12 B at instruction 9, of a budget of 12 B",
        "",
        "        #   time [ms]    RAM after",
        "        0       0.000          4 B  compute    a  takes 1 s",
        "        1   1,000.000          4 B  page out   a  4 B beside the core in 5 s",
        "        2   1,000.000         10 B  compute    b  takes 2 s",
        "  !     3   3,000.000         10 B  wait for   a  STALL 3 s",
        "        4   6,000.000          6 B  free       a  gives 4 B back",
        "        5   6,000.000         11 B  compute    c  takes 3 s",
        "        6   9,000.000          5 B  free       b  gives 6 B back",
        "        7   9,000.000          9 B  page in    a  4 B beside the core in 7 s",
        "  !     8   9,000.000          9 B  wait for   a  STALL 7 s",
        "        9  16,000.000         12 B  compute    d  takes 4 s  <- peak 12 B",
        "       10  20,000.000          8 B  free       a  gives 4 B back",
        "       11  20,000.000          3 B  free       c  gives 5 B back",
    ]


def test_recomputations_and_waits_for_the_bus_are_told() -> None:
    """A second computation is called that; a transfer behind another says how long it waits."""
    lines = listed("c0 o0 c1 o1 c2 w1 f1 w0 f0 c0 c3 f0 f2")
    assert "recompute  a  takes 1 s" in lines[15]
    assert "page out   b  6 B beside the core in 5 s, after 3 s for the bus" in lines[9]
    assert "wait for   a  done already" in lines[13]
    assert lines[13].startswith("    ")


def test_broken_plan_is_listed_with_its_violations() -> None:
    """Whatever is wrong stands below."""
    lines = listed("c0 f9 c1 c2")
    assert "not valid:" in lines
    assert "  instruction 1, free 9: the graph has no such index" in lines
