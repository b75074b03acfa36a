"""The listing tells a plan line by line."""

from kit.plans import PAGED, plan
from kit.worked import even_costs, skip_graph, state, update
from poetmodel.graph import Graph, operation
from poetmodel.placement import place
from poetmodel.plan import check_plan
from poetmodel.plan.listing import plan_listing
from poetmodel.units import ESTIMATES


def pair_step():
    """Return x, w, y = f(x, w) in place of x, v, w+ = u(w, y)."""
    return Graph(
        name="step",
        nodes=(
            operation("x", output_bytes=10),
            state("w", 8),
            operation("y", output_bytes=6, inputs=("x", "w"), in_place={"y": "x"}),
            state("v", 3),
            update("u", "y", w=8),
        ),
    )


def listed(text, mode="dma"):
    """Return the lines of the listing of a program of `skip_graph`."""
    graph = skip_graph()
    made = plan(text, mode, ram_budget_bytes=12, device="board")
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
        "        4   6,000.000          6 B  free       a  gives 4 B back",
        "        5   6,000.000         11 B  compute    c  takes 3 s",
        "        6   9,000.000          5 B  free       b  gives 6 B back",
        "        7   9,000.000          9 B  page in    a  4 B beside the core in 7 s",
        "  !     8   9,000.000          9 B  wait for   a  STALL 7 s",
        "        9  16,000.000         12 B  compute    d  takes 4 s  <- peak 12 B",
        "       10  20,000.000          8 B  free       a  gives 4 B back",
        "       11  20,000.000          3 B  free       c  gives 5 B back",
    ]


def test_recomputations_and_waits_for_the_bus_are_told():
    """A second computation is called that; a transfer behind another says how long it waits.

    Whatever is wrong with a plan stands below.
    """
    lines = listed("c0 o0 c1 o1 c2 w1 f1 w0 f0 c0 c3 f0 f2")
    assert "recompute  a  takes 1 s" in lines[15]
    assert "page out   b  6 B beside the core in 5 s, after 3 s for the bus" in lines[9]
    assert "wait for   a  done already" in lines[13]
    assert lines[13].startswith("    ")
    lines = listed("c0 f9 c1 c2")
    assert "not valid:" in lines
    assert "  instruction 1, free 9: the graph has no such index" in lines


def test_state_and_operators_in_place_are_told():
    """What is read from storage, written back, held in RAM, and written over what."""
    graph = pair_step()
    made = plan("c0 c1 c2 f0 c3 c4 f2 o4 f4", "blocking", resident=(3,))
    lines = plan_listing(graph, made, check_plan(graph, None, made)).splitlines()
    assert lines[2] == "  state   1 tensor of 3 B resident, 1 tensor of 8 B on storage"
    words = [line.split(" B  ", 1)[1] for line in lines[5:]]
    assert words == [
        "compute    x   takes 0 s",
        "read       w   from storage, 8 B in 0 s  <- peak 21 B",
        "compute    y   takes 0 s, y in place of x",
        "free       x   gives 10 B back",
        "hold       v   3 B, resident",
        "compute    u   takes 0 s",
        "free       y   gives 6 B back",
        "page out   w+  writes w back, 8 B in 0 s",
        "free       w+  gives 8 B back",
    ]


def test_listing_with_addresses():
    """What is made or held has its offset, by name where a computation makes several things."""
    graph = pair_step()
    made = plan("c0 c1 c2 f0 c3 c4 f2", "blocking", resident=(1, 3))
    arena = place(graph, made, alignment=4)
    check = check_plan(graph, None, made)
    lines = plan_listing(graph, made, check, arena).splitlines()
    assert "  arena   24 B, lower bound 24 B, fragmentation 0.00%" in lines
    assert [line.partition("  x  ")[2] for line in lines if " compute    x" in line] == [
        "takes 0 s, at 12  <- peak 21 B"
    ]
    assert any(line.endswith("w  8 B, resident, at 0") for line in lines)
    assert any(line.endswith("y in place of x, at 12") for line in lines)
    graph, made = skip_graph(mask=True, workspace=True), plan("c0 c1 c2 f1 c3 f0 f2 f3")
    check = check_plan(graph, even_costs(graph), made)
    lines = plan_listing(graph, made, check, place(graph, made)).splitlines()
    assert any("takes 2 s, b at " in line and ", workspace at " in line for line in lines)
    assert any("takes 3 s, c at " in line and ", c.mask at " in line for line in lines)
