"""Plans of schedules with state and operators in place: the figures of the schedule, and DMA."""

import pytest

from kit.plans import bus_costs, plan_cases
from kit.worked import state, update
from poetmodel.device import Costs
from poetmodel.graph import Graph, operation
from poetmodel.plan import Op, check_plan
from poetmodel.planner import make_plan
from poetmodel.schedule import Schedule, checkpoint_all, simulate


def test_plans_say_where_state_is():
    """Homes are those of the schedule; version 1 graphs have none."""
    for case in plan_cases(20, with_state=True):
        plan = case.plan("blocking")
        assert plan.resident == case.schedule.resident
        assert plan.memory_mapped == case.costs.device.is_memory_mapped
    graph = Graph(name="one", nodes=(operation("a", output_bytes=1),))
    costs = Costs.from_arrays(graph, compute_time_s=[1], compute_energy_j=[1])
    assert make_plan(graph, costs, checkpoint_all(graph), mode="dma").resident is None


def layers():
    """Return three layers y = f(y, w), w+ = u(w, y), each with all of its state on storage.

    f takes 4 s, u 1 s, a page-in 3 s and a page-out 2 s; w has 10 B and y 1 B. In a stage its w is
    read, used and written back. Nodes: x, then w, f, u of each layer.
    """
    nodes = [operation("x", output_bytes=1)]
    for layer, before in enumerate(("x", "y0", "y1")):
        nodes += [
            state(f"w{layer}", 10),
            operation(f"y{layer}", output_bytes=1, inputs=(before, f"w{layer}")),
            update(f"u{layer}", f"y{layer}", **{f"w{layer}": 10}),
        ]
    graph = Graph(name="layers", nodes=tuple(nodes))
    times = [0.0, *([0.0, 4.0, 1.0] * 3)]
    costs = bus_costs(graph, times, 3.0, 2.0)
    # Tensors are numbered as their nodes.
    kept = []
    for first in (1, 4, 7):
        before = first - 2 if first > 1 else 0
        kept += [(first, before), (first + 1, before)]
        kept += [(first + 1, first), (first + 2, first), (first + 2, first + 1)]
        kept += [(first + 3, first + 1)] if first < 7 else []
    schedule = Schedule(
        R=tuple((t, t) for t in range(10)),
        S_RAM=tuple(kept),
        S_AUX=tuple((t, first) for first in (1, 4, 7) for t in (first + 1, first + 2)),
        M_out=((3, 3), (6, 6), (9, 9)),
    )
    return graph, costs, schedule


@pytest.mark.parametrize(
    ("budget", "makespan_s"),
    [
        # Room for one w: 3 layers of 3 + 4 + 1 + 2 s, one after the other.
        pytest.param(12, 30.0, id="one"),
        # Room for two: w1 is read beside f0, and w0 goes beside f1; w2 has to wait for that.
        pytest.param(22, 3 + 3 * 5 + 2 + 2.0, id="two"),
        # Room for all three: everything but the first read and the last write is hidden.
        pytest.param(32, 3 + 3 * 5 + 2.0, id="three"),
    ],
)
def test_state_is_read_ahead_and_written_back_behind(budget, makespan_s):
    """Each w comes during the layer before and goes during the layer after, where RAM allows it."""
    graph, costs, schedule = layers()
    simulation = simulate(graph, costs, schedule)
    assert (simulation.violations, simulation.peak_ram_bytes) == ((), 12)
    plan = make_plan(graph, costs, schedule, mode="dma", ram_budget_bytes=budget)
    check = check_plan(graph, costs, plan)
    assert check.violations == ()
    assert check.peak_ram_bytes <= budget
    assert check.makespan_s == pytest.approx(makespan_s)


def test_the_room_of_a_replacement_is_held_until_it_is_written_back():
    """Right after the update the RAM is that of w; it falls with the free, after the wait."""
    graph, costs, schedule = layers()
    plan = make_plan(graph, costs, schedule, mode="dma", ram_budget_bytes=22)
    check = check_plan(graph, costs, plan)
    program = plan.program
    update_place = program.index((Op.COMPUTE, 3))
    out, wait, free = (program.index((op, 3)) for op in (Op.PAGE_OUT, Op.WAIT, Op.FREE))
    assert update_place < out < wait < free
    assert program.index((Op.COMPUTE, 5), out) < wait  # y1 is computed meanwhile
    assert check.moments[free].high_bytes - check.moments[free].ram_bytes == 10


def in_place_chain():
    """Return a, b in place of a, c = f(b), d = g(c, a) with a paged out; 10 B and 2 s each."""
    graph = Graph(
        name="chain",
        nodes=(
            operation("a", output_bytes=10),
            operation("b", output_bytes=10, inputs=("a",), in_place={"b": "a"}),
            operation("c", output_bytes=1, inputs=("b",)),
            operation("d", output_bytes=1, inputs=("c", "a")),
        ),
    )
    costs = bus_costs(graph, [2.0] * 4, 1.0, 3.0)
    schedule = Schedule(
        R=tuple((t, t) for t in range(4)),
        S_RAM=((1, 0), (2, 1), (3, 2)),
        S_AUX=((1, 0), (2, 0), (3, 0)),
        M_in=((3, 0),),
        M_out=((0, 0),),
    )
    return graph, costs, schedule


def test_an_input_that_is_paged_out_is_written_over_when_that_is_done():
    """In 12 B the core waits 3 s for the page-out before b; in 21 B b has memory of its own."""
    graph, costs, schedule = in_place_chain()
    assert simulate(graph, costs, schedule).peak_ram_bytes == 12
    tight, loose = (
        check_plan(graph, costs, make_plan(graph, costs, schedule, mode="dma", ram_budget_bytes=b))
        for b in (12, 21)
    )
    assert (tight.violations, tight.peak_ram_bytes, tight.makespan_s) == ((), 12, 12.0)
    assert (loose.violations, loose.makespan_s) == ((), 9.0)
    assert loose.peak_ram_bytes > 12
