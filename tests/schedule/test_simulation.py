"""The simulator: hand-computed curves, every rule, times and energies, and a second opinion."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.closed_form import broken_entries, copies, energy_j, memory_curve
from kit.instances import random_schedule, seeded
from kit.strategies import costs_for, graphs
from kit.worked import bench_device
from poetmodel.device import Costs
from poetmodel.errors import CostError
from poetmodel.graph import (
    Graph,
    Node,
    Tensor,
    checkpoint_all_peak_bytes,
    checkpoint_all_profile,
    floor,
    operation,
)
from poetmodel.schedule import MemoryPoint, Schedule, Simulation, checkpoint_all, simulate

if TYPE_CHECKING:
    from collections.abc import Sequence


def make(*nodes: Node) -> Graph:
    """Return a graph of nodes."""
    return Graph(name="example", nodes=nodes)


def op(name: str, size: int, *inputs: str, **attributes: Any) -> Node:
    """Return a node with one tensor of its own name."""
    return operation(name, output_bytes=size, inputs=inputs, **attributes)


def once(graph: Graph) -> tuple[tuple[int, int], ...]:
    """Return `R` with one computation of every node."""
    return tuple((t, t) for t in range(len(graph.nodes)))


def curve(run: Simulation) -> list[tuple[int, int, int]]:
    """Return the memory curve as plain tuples (stage, step, bytes)."""
    return [(point.stage, point.node, point.ram_bytes) for point in run.curve]


@pytest.fixture
def chain() -> Graph:
    """Return a chain of four."""
    return make(op("a", 10), op("b", 20, "a"), op("c", 30, "b"), op("d", 5, "c"))


@pytest.fixture
def diamond() -> Graph:
    """Return one tensor with two readers that meet again."""
    return make(op("a", 8), op("b", 4, "a"), op("c", 6, "a"), op("d", 2, "b", "c"))


@pytest.fixture
def skip() -> Graph:
    """Return a chain whose first tensor is read again at its end."""
    return make(op("x", 8), op("y", 8, "x"), op("z", 8, "y"), op("w", 1, "z", "x"))


# -- hand-computed curves ----------------------------------------------------------------------


def test_chain_holds_input_and_output_of_each_step(chain: Graph) -> None:
    """In a chain a step's input goes after it: 10, 10+20, 20+30, 30+5."""
    run = simulate(chain, None, checkpoint_all(chain))
    assert run.violations == ()
    assert curve(run) == [(0, 0, 10), (1, 1, 30), (2, 2, 50), (3, 3, 35)]
    assert run.peak == MemoryPoint(2, 2, 50)
    assert run.peak_ram_bytes == 50
    assert run.peak_tensors == (1, 2)


def test_diamond_holds_the_shared_input_to_its_last_reader(diamond: Graph) -> None:
    """a=8, then a+b=12, a+b+c=18, b+c+d=12."""
    run = simulate(diamond, None, checkpoint_all(diamond))
    assert run.violations == ()
    assert curve(run) == [(0, 0, 8), (1, 1, 12), (2, 2, 18), (3, 3, 12)]
    assert run.peak_tensors == (0, 1, 2)


def test_diamond_recomputes_the_shared_input(diamond: Graph) -> None:
    """A tensor whose step the stage has not reached counts: at (2,0) b=4 lies beside a=8."""
    schedule = Schedule(R=(*once(diamond), (2, 0)), S_RAM=((1, 0), (2, 1), (3, 1), (3, 2)))
    run = simulate(diamond, None, schedule)
    assert run.violations == ()
    assert curve(run) == [(0, 0, 8), (1, 1, 12), (2, 0, 12), (2, 2, 18), (3, 3, 12)]


def test_skip_connection_is_held_across(skip: Graph) -> None:
    """Kept: x=8, x+y=16, x+y+z=24, x+z+w=17."""
    run = simulate(skip, None, checkpoint_all(skip))
    assert curve(run) == [(0, 0, 8), (1, 1, 16), (2, 2, 24), (3, 3, 17)]


def test_skip_connection_is_paged(skip: Graph) -> None:
    """Paged out at once and in at its use: y+z=16 in stage 2, z+x=16 from the page-in on."""
    schedule = Schedule(
        R=once(skip),
        S_RAM=((1, 0), (2, 1), (3, 2)),
        S_AUX=((1, 0), (2, 0), (3, 0)),
        M_in=((3, 0),),
        M_out=((0, 0),),
    )
    run = simulate(skip, None, schedule)
    assert run.violations == ()
    assert curve(run) == [(0, 0, 8), (1, 1, 16), (2, 2, 16), (3, 0, 16), (3, 3, 17)]
    assert (run.aux_used_bytes, run.written_bytes, run.read_bytes) == (8, 8, 8)


def test_page_in_counts_in_its_own_stage(skip: Graph) -> None:
    """A page-in one stage early has its destination beside that stage's inputs and outputs: 24."""
    schedule = Schedule(
        R=once(skip),
        S_RAM=((1, 0), (2, 1), (3, 0), (3, 2)),
        S_AUX=((1, 0), (2, 0)),
        M_in=((2, 0),),
        M_out=((0, 0),),
    )
    run = simulate(skip, None, schedule)
    assert run.violations == ()
    assert curve(run) == [(0, 0, 8), (1, 1, 16), (2, 0, 16), (2, 2, 24), (3, 3, 17)]


def test_page_in_alone_can_be_the_peak() -> None:
    """A page-in that nothing reads is in the peak from its own step on, and goes after it."""
    graph = make(op("big", 50), op("b", 1, "big"), op("c", 1, "b"))
    schedule = Schedule(
        R=once(graph), S_RAM=((1, 0), (2, 1)), S_AUX=((2, 0),), M_in=((2, 0),), M_out=((0, 0),)
    )
    run = simulate(graph, None, schedule)
    assert curve(run) == [(0, 0, 50), (1, 1, 51), (2, 0, 51), (2, 2, 2)]
    assert run.peak == MemoryPoint(1, 1, 51)


def test_two_output_node_makes_all_its_tensors_again() -> None:
    """Recomputed with one old output kept, the old copy counts beside both new ones."""
    norm = Node(
        name="bn",
        op="batch_norm",
        phase="forward",
        inputs=("x",),
        outputs=(Tensor(name="bn", bytes=8), Tensor(name="bn.mean", bytes=2)),
    )
    graph = make(op("x", 8), norm, op("r", 8, "bn"), op("g", 8, "r", "bn", "bn.mean"))
    run = simulate(graph, None, checkpoint_all(graph))
    assert curve(run) == [(0, 0, 8), (1, 1, 18), (2, 2, 18), (3, 3, 26)]
    again = Schedule(
        R=(*once(graph), (3, 1)), S_RAM=((1, 0), (2, 0), (2, 1), (2, 2), (3, 0), (3, 2), (3, 3))
    )
    run = simulate(graph, None, again)
    assert run.violations == ()
    # (2,2): x 8 + bn 8 + mean 2 + r 8; (3,1): x 8 + mean 2 + r 8 + new 8 + 2; (3,3): all but x.
    assert curve(run) == [(0, 0, 8), (1, 1, 18), (2, 2, 26), (3, 1, 28), (3, 3, 26)]
    assert run.peak_tensors == (0, 1, 2, 3)


def test_page_in_before_recomputation_counts_beside_it(skip: Graph) -> None:
    """A tensor paged in and then computed in the same step is there twice during the step."""
    schedule = Schedule(
        R=(*once(skip), (3, 0)),
        S_RAM=((1, 0), (2, 1), (3, 2)),
        S_AUX=((3, 0),),
        M_in=((3, 0),),
        M_out=((0, 0),),
    )
    run = simulate(skip, None, schedule)
    assert run.violations == ()
    assert curve(run)[3:] == [(3, 0, 24), (3, 3, 17)]


def test_node_without_outputs_takes_its_inputs_and_workspace() -> None:
    """An update step makes nothing: its point is its input plus its workspace."""
    update = Node(
        name="update", op="sgd", phase="update", inputs=("g",), outputs=(), workspace_bytes=3
    )
    graph = make(op("g", 7), update, op("h", 4, "g"))
    run = simulate(graph, None, checkpoint_all(graph))
    assert curve(run) == [(0, 0, 7), (1, 1, 10), (2, 2, 11)]
    twice = simulate(graph, None, Schedule(R=(*once(graph), (2, 1)), S_RAM=((1, 0), (2, 0))))
    assert twice.violations == ()
    assert curve(twice)[2:] == [(2, 1, 10), (2, 2, 11)]


def test_workspace_counts_only_during_its_step(chain: Graph) -> None:
    """100 bytes of workspace at b: 130 there, nothing elsewhere; again when b is recomputed."""
    nodes = [replace(v, workspace_bytes=100 if v.name == "b" else 0) for v in chain.nodes]
    graph = make(*nodes)
    run = simulate(graph, None, checkpoint_all(graph))
    assert curve(run) == [(0, 0, 10), (1, 1, 130), (2, 2, 50), (3, 3, 35)]
    schedule = Schedule(R=(*once(graph), (2, 1)), S_RAM=((1, 0), (2, 0), (3, 2)))
    assert curve(simulate(graph, None, schedule))[2:] == [(2, 1, 130), (2, 2, 50), (3, 3, 35)]


def test_sample_on_storage_is_paged_in_without_a_page_out() -> None:
    """A tensor that starts on storage can be let go and read again; it takes no storage room."""
    graph = make(
        op("sample", 16, on_aux=True), op("c", 4, "sample"), op("d", 4, "c"),
        op("e", 1, "sample", "d"),
    )  # fmt: skip
    schedule = Schedule(
        R=once(graph), S_RAM=((1, 0), (2, 1), (3, 2)), S_AUX=((3, 0),), M_in=((3, 0),)
    )
    run = simulate(graph, None, schedule)
    assert run.violations == ()
    assert curve(run) == [(0, 0, 16), (1, 1, 20), (2, 2, 8), (3, 0, 20), (3, 3, 21)]
    assert run.aux_used_bytes == 0
    wasteful = simulate(graph, None, replace(schedule, M_out=((0, 0),)))
    assert wasteful.violations == ()
    assert (wasteful.aux_used_bytes, wasteful.written_bytes) == (0, 16)


def test_unread_tensor_goes_after_its_own_step() -> None:
    """A tensor without readers counts at its step only, unless a schedule keeps it."""
    graph = make(op("a", 1), op("idle", 40, "a"), op("c", 2, "a"), op("d", 3, "c"))
    run = simulate(graph, None, checkpoint_all(graph))
    assert curve(run) == [(0, 0, 1), (1, 1, 41), (2, 2, 3), (3, 3, 5)]
    kept = Schedule(R=once(graph), S_RAM=((1, 0), (2, 0), (2, 1), (3, 1), (3, 2)))
    run = simulate(graph, None, kept)
    assert curve(run) == [(0, 0, 1), (1, 1, 41), (2, 2, 43), (3, 3, 5)]


def test_tensor_held_for_nothing_goes_at_its_own_step(diamond: Graph) -> None:
    """Begun with but neither used nor kept, b counts up to step 1 of stage 2 and not after it."""
    graph = make(*diamond.nodes[:3], op("d", 2, "c"))
    schedule = Schedule(R=(*once(graph), (2, 0)), S_RAM=((1, 0), (2, 1), (3, 2)))
    run = simulate(graph, None, schedule)
    assert curve(run)[2:] == [(2, 0, 12), (2, 2, 14), (3, 3, 8)]


def test_old_copy_counts_beside_the_new_one(chain: Graph) -> None:
    """Recomputing a tensor that is in RAM takes its room twice during the step."""
    schedule = Schedule(R=(*once(chain), (2, 1)), S_RAM=((1, 0), (2, 0), (2, 1), (3, 2)))
    run = simulate(chain, None, schedule)
    assert run.violations == ()
    assert curve(run)[2] == (2, 1, 50)  # a 10 + old b 20 + new b 20
    assert run.peak == MemoryPoint(2, 1, 50)  # the first of two equal points


def test_page_out_shows_in_the_curve_and_takes_no_ram(chain: Graph) -> None:
    """A step that only pages out is a point of the curve at what is in RAM."""
    schedule = Schedule(R=once(chain), S_RAM=((1, 0), (2, 0), (2, 1), (3, 2)), M_out=((2, 0),))
    run = simulate(chain, None, schedule)
    assert run.violations == ()
    assert curve(run) == [(0, 0, 10), (1, 1, 30), (2, 0, 30), (2, 2, 50), (3, 3, 35)]


def test_storage_used_counts_each_tensor_once(chain: Graph) -> None:
    """Space is not reused, and paging a tensor out twice takes its room once but writes twice."""
    schedule = Schedule(
        R=once(chain), S_RAM=((1, 0), (2, 1), (3, 2)), M_out=((0, 0), (1, 0), (1, 1), (2, 2))
    )
    run = simulate(chain, None, schedule)
    assert run.violations == ()
    assert run.aux_used_bytes == 60
    assert run.written_bytes == 70


def test_graph_of_one_node_is_simulated() -> None:
    """One node: one stage, one point."""
    run = simulate(make(op("only", 3, workspace_bytes=2)), None, Schedule(R=((0, 0),)))
    assert run.violations == ()
    assert curve(run) == [(0, 0, 5)]


# -- every rule --------------------------------------------------------------------------------

KEPT = ((1, 0), (2, 1), (3, 2))
ONCE = ((0, 0), (1, 1), (2, 2), (3, 3))


@pytest.mark.parametrize(
    ("relations", "violation"),
    [
        ({"R": ONCE[:3]}, "R[3,3]: node 'd' is not computed in its own stage"),
        ({"R": (*ONCE, (1, 2))}, "R[1,2]: node 'c' is first made in stage 2"),
        ({"R": (*ONCE, (3, 4))}, "R[3,4]: the graph has no such stage or index"),
        ({"R": (*ONCE, (4, 0))}, "R[4,0]: the graph has no such stage or index"),
        ({"R": (*ONCE, (-1, 0))}, "R[-1,0]: the graph has no such stage or index"),
        ({"R": (*ONCE, (3, 1))}, "R[3,1]: node 'b' needs 'a' in RAM"),
        ({"S_RAM": KEPT[:2]}, "R[3,3]: node 'd' needs 'c' in RAM"),
        ({"S_RAM": (*KEPT, (3, 1))}, None),
        (
            {"S_RAM": (*KEPT, (3, 0))},
            "S_RAM[3,0]: tensor 'a' is not in RAM when stage 3 begins",
        ),
        ({"S_RAM": (*KEPT, (1, 1))}, "S_RAM[1,1]: tensor 'b' is first made in stage 1"),
        ({"S_RAM": (*KEPT, (1, 7))}, "S_RAM[1,7]: the graph has no such stage or index"),
        (
            {"S_AUX": ((2, 0),)},
            "S_AUX[2,0]: tensor 'a' is not on storage when stage 2 begins",
        ),
        ({"S_AUX": ((0, 0),)}, "S_AUX[0,0]: tensor 'a' is first made in stage 0"),
        (
            {"S_AUX": ((1, 0),), "M_out": ((1, 0),)},
            "S_AUX[1,0]: tensor 'a' is not on storage when stage 1 begins",
        ),
        (
            {"M_in": ((2, 0),)},
            "M_in[2,0]: tensor 'a' is not on storage when stage 2 begins",
        ),
        (
            {"M_in": ((2, 0),), "M_out": ((0, 0),)},
            "M_in[2,0]: tensor 'a' is not on storage when stage 2 begins",
        ),
        (
            {"M_in": ((1, 0),), "M_out": ((0, 0),), "S_AUX": ((1, 0),)},
            "M_in[1,0]: tensor 'a' is in RAM already",
        ),
        ({"M_in": ((1, 1),)}, "M_in[1,1]: tensor 'b' is first made in stage 1"),
        ({"M_out": ((2, 0),)}, "M_out[2,0]: tensor 'a' is not in RAM at step 0"),
        ({"M_out": ((1, 2),)}, "M_out[1,2]: tensor 'c' is first made in stage 2"),
        ({"M_out": ((2, 2),)}, None),
        ({"M_in": ((9, 9),)}, "M_in[9,9]: the graph has no such stage or index"),
    ],
)
def test_each_broken_rule_is_named(
    chain: Graph, relations: dict[str, tuple[tuple[int, int], ...]], violation: str | None
) -> None:
    """Exactly the broken rule is reported, with the entry, the name and the reason."""
    schedule = replace(Schedule(R=ONCE, S_RAM=KEPT), **relations)
    run = simulate(chain, None, schedule)
    assert run.violations == (() if violation is None else (violation,))
    assert run.valid == (violation is None)


def test_node_that_must_not_be_recomputed() -> None:
    """A non-recomputable node is computed once; its first computation is no violation."""
    graph = make(op("drop", 4, recomputable=False), op("b", 1, "drop"))
    run = simulate(graph, None, Schedule(R=((0, 0), (1, 0), (1, 1))))
    assert run.violations == ("R[1,0]: node 'drop' must not be computed again",)


def test_every_violation_is_reported(chain: Graph) -> None:
    """A schedule of nothing but holes reports each of them, not the first alone."""
    run = simulate(chain, None, Schedule(R=((0, 0), (1, 1), (2, 2)), M_out=((3, 0),)))
    assert len(run.violations) == 4
    assert [text.split(":")[0] for text in run.violations] == [
        "R[1,1]", "R[2,2]", "R[3,3]", "M_out[3,0]",
    ]  # fmt: skip


def test_what_is_missing_stays_missing(chain: Graph) -> None:
    """A tensor that is claimed without being there is of no use to what follows."""
    run = simulate(chain, None, Schedule(R=ONCE, S_RAM=((2, 1), (3, 2), (1, 0), (2, 0), (3, 0))))
    assert run.valid
    run = simulate(chain, None, Schedule(R=ONCE, S_RAM=((1, 0), (2, 1), (3, 0), (3, 2))))
    assert [text.split(":")[0] for text in run.violations] == ["S_RAM[3,0]"]
    run = simulate(chain, None, Schedule(R=(*ONCE, (3, 1)), S_RAM=((1, 0), (2, 1), (3, 0), (3, 2))))
    assert [text.split(":")[0] for text in run.violations] == ["S_RAM[3,0]", "R[3,1]"]
    run = simulate(chain, None, Schedule(R=ONCE, S_RAM=KEPT, S_AUX=((2, 0),), M_in=((2, 0),)))
    assert [text.split(":")[0] for text in run.violations] == ["S_AUX[2,0]", "M_in[2,0]"]


def test_empty_schedule_is_reported_not_raised(chain: Graph) -> None:
    """Nothing at all is four violations and a peak of nothing."""
    run = simulate(chain, None, Schedule(R=()))
    assert len(run.violations) == 4
    assert run.peak == MemoryPoint(0, 0, 0)
    assert run.peak_tensors == ()


# -- times and energies ------------------------------------------------------------------------


def costs_of(graph: Graph, *, idle_power_w: float = 0.0, mode: str = "blocking") -> Costs:
    """Return costs by hand: computing k takes 1+k s, 10 J; in 0.5 s, 3 J; out 0.25 s, 4 J."""
    n, m = len(graph.nodes), len(graph.tensors)
    return Costs.from_arrays(
        graph,
        compute_time_s=[1.0 + k for k in range(n)],
        compute_energy_j=[10.0] * n,
        page_in=[(0.5, 3.0)] * m,
        page_out=[(0.25, 4.0)] * m,
        device=bench_device(idle_power_w=idle_power_w, mode=mode),
    )


@pytest.fixture
def busy() -> Schedule:
    """Return a schedule of the chain with one recomputation of a, two page-outs, one page-in."""
    return Schedule(
        R=(*ONCE, (2, 0)),
        S_RAM=((1, 0), (2, 1), (3, 2)),
        S_AUX=((3, 1),),
        M_in=((3, 1),),
        M_out=((1, 1), (2, 2)),
    )


def test_times_and_energies_add_up(chain: Graph, busy: Schedule) -> None:
    """1+2+3+4 and once more 1 s of compute; two page-outs and a page-in; every entry once."""
    run = simulate(chain, costs_of(chain), busy)
    assert run.violations == ()
    assert run.compute_s == 11.0
    assert run.transfer_s == 1.0
    assert run.time_s == 12.0
    assert run.energy_j == 5 * 10.0 + 3.0 + 2 * 4.0
    assert run.baseline_energy_j == 40.0
    assert run.overhead_j == 21.0


@pytest.mark.parametrize(
    ("counts", "time_s"), [("compute", 11.0), ("serial", 12.0), ("overlap", 12.0)]
)
def test_idle_power_is_charged_over_the_time_that_counts(
    chain: Graph, busy: Schedule, counts: str, time_s: float
) -> None:
    """2 W over compute time, or compute plus transfer; the baseline has one pass of 10 s."""
    run = simulate(chain, costs_of(chain, idle_power_w=2.0), busy, deadline_counts=counts)
    assert run.time_s == time_s
    assert run.energy_j == 61.0 + 2.0 * time_s
    assert run.baseline_energy_j == 40.0 + 2.0 * 10.0
    assert run.overhead_j == 21.0 + 2.0 * (time_s - 10.0)


@pytest.mark.parametrize(("mode", "time_s"), [("blocking", 12.0), ("dma", 12.0)])
def test_meaning_follows_the_storage_mode(
    chain: Graph, busy: Schedule, mode: str, time_s: float
) -> None:
    """Without a meaning given, transfers count; the makespan of a plan is not known here."""
    run = simulate(chain, costs_of(chain, idle_power_w=1.0, mode=mode), busy)
    assert run.time_s == time_s
    assert run.energy_j == 61.0 + time_s


def test_no_costs_no_figures(chain: Graph, busy: Schedule) -> None:
    """Without costs memory and validity are checked and the rest is absent, not 0."""
    run = simulate(chain, None, busy)
    assert run.valid
    assert (run.compute_s, run.transfer_s, run.time_s) == (None, None, None)
    assert (run.energy_j, run.baseline_energy_j, run.overhead_j) == (None, None, None)


def test_paging_without_storage_is_a_violation(chain: Graph, busy: Schedule) -> None:
    """Costs that know no storage cannot price a transfer, and say so."""
    costs = Costs.from_arrays(chain, compute_time_s=[1] * 4, compute_energy_j=[1] * 4)
    run = simulate(chain, costs, busy)
    assert run.violations == ("tensors are paged, but the costs know of no auxiliary storage",)
    assert simulate(chain, costs, checkpoint_all(chain)).valid


def test_costs_of_another_graph_are_refused(chain: Graph, skip: Graph) -> None:
    """Costs must name the nodes of the graph that is simulated."""
    with pytest.raises(CostError, match="no compute costs for 'a', 'b', 'c', 'd'"):
        simulate(chain, costs_of(skip), checkpoint_all(chain))


def test_small_overheads_keep_their_digits(chain: Graph) -> None:
    """An overhead 1e-15 of the baseline is not lost in the difference of two large numbers."""
    costs = Costs.from_arrays(chain, compute_time_s=[1] * 4, compute_energy_j=[1e-9, 1e6, 1e6, 1e6])
    run = simulate(chain, costs, Schedule(R=(*ONCE, (2, 0)), S_RAM=KEPT))
    assert run.overhead_j == 1e-9


# -- properties --------------------------------------------------------------------------------

SEEDS = st.integers(min_value=0, max_value=2**32)


@given(graph=graphs(on_aux=True), seed=SEEDS, data=st.data())
@settings(deadline=None)
def test_simulator_agrees_with_the_closed_form(
    graph: Graph, seed: int, data: st.DataObject
) -> None:
    """Of any valid schedule the simulator finds the sums that the closed form states."""
    schedule = random_schedule(seeded(seed), graph)
    costs = data.draw(costs_for(graph))
    run = simulate(graph, costs, schedule)
    assert run.violations == ()
    assert broken_entries(graph, schedule) == set()
    expected = memory_curve(graph, schedule)
    assert curve(run) == [(t, k, size) for (t, k), size in sorted(expected.items())]
    assert run.peak_tensors == tuple(copies(graph, schedule, run.peak.stage, run.peak.node))
    table = costs.table(graph)
    assert run.energy_j == energy_j(
        schedule, table.compute_energy_j, table.page_in_energy_j, table.page_out_energy_j
    )
    assert run.baseline_energy_j is not None
    assert run.overhead_j == run.energy_j - run.baseline_energy_j


@given(graph=graphs(on_aux=True), seed=SEEDS, data=st.data())
@settings(deadline=None)
def test_simulator_objects_exactly_where_a_rule_is_broken(
    graph: Graph, seed: int, data: st.DataObject
) -> None:
    """Of any pairs, the simulator objects if and only if a rule of the closed form is broken."""
    schedule = random_schedule(seeded(seed), graph)
    n, m = len(graph.nodes), len(graph.tensors)
    changes = {}
    for relation, limit in (("R", n), ("S_RAM", m), ("S_AUX", m), ("M_in", m), ("M_out", m)):
        if limit == 0:
            continue
        pair = st.tuples(st.integers(0, n - 1), st.integers(0, limit - 1))
        flipped = data.draw(st.sets(pair, max_size=2))
        changes[relation] = tuple(set(getattr(schedule, relation)) ^ flipped)
    changed = replace(schedule, **changes)
    run = simulate(graph, None, changed)
    assert run.valid == (not broken_entries(graph, changed)), run.violations
    if run.valid:
        expected = memory_curve(graph, changed)
        assert curve(run) == [(t, k, size) for (t, k), size in sorted(expected.items())]


@given(graph=graphs(on_aux=True), seed=SEEDS)
@settings(deadline=None)
def test_no_valid_schedule_is_below_the_floor(graph: Graph, seed: int) -> None:
    """The largest working set of one step is a lower bound on every peak."""
    run = simulate(graph, None, random_schedule(seeded(seed), graph))
    assert run.peak_ram_bytes >= floor(graph).bytes
    assert run.peak_ram_bytes == max(point.ram_bytes for point in run.curve)
    first = next(point for point in run.curve if point.ram_bytes == run.peak_ram_bytes)
    assert run.peak == first


@given(graph=graphs(on_aux=True))
@settings(deadline=None)
def test_checkpoint_all_has_the_profile_of_the_graph(graph: Graph) -> None:
    """Every node once, tensors to their last use: the simulator finds the graph's own profile."""
    run = simulate(graph, None, checkpoint_all(graph))
    assert run.violations == ()
    assert tuple(point.ram_bytes for point in run.curve) == checkpoint_all_profile(graph)
    assert run.peak_ram_bytes == checkpoint_all_peak_bytes(graph)


@given(graph=graphs(on_aux=True), seed=SEEDS)
@settings(deadline=None)
def test_names_change_nothing(graph: Graph, seed: int) -> None:
    """Other names in the same order give the same figures."""
    schedule = random_schedule(seeded(seed), graph)
    nodes = tuple(
        replace(
            node,
            name=f"_{node.name}",
            inputs=tuple(f"_{name}" for name in node.inputs),
            outputs=tuple(replace(made, name=f"_{made.name}") for made in node.outputs),
        )
        for node in graph.nodes
    )
    assert simulate(Graph(name="other", nodes=nodes), None, schedule) == simulate(
        graph, None, schedule
    )


# -- size --------------------------------------------------------------------------------------


def deep(layers: int) -> Graph:
    """Return a forward chain of `layers` and the backward chain that reads it in reverse."""
    forward = [op(f"f{k}", 100 + k, *([f"f{k - 1}"] if k else [])) for k in range(layers)]
    backward = [
        op(f"b{k}", 100 + k, f"f{k}", *([f"b{k + 1}"] if k < layers - 1 else []))
        for k in reversed(range(layers))
    ]
    return make(*forward, *backward)


def test_schedule_of_500_nodes_is_simulated() -> None:
    """Keeping all, and recomputing a whole forward pass for every backward step, at 500 nodes."""
    graph = deep(250)
    kept = simulate(graph, None, checkpoint_all(graph))
    assert kept.violations == ()
    assert kept.peak_ram_bytes == checkpoint_all_peak_bytes(graph)
    again: list[tuple[int, int]] = [(t, t) for t in range(500)]
    again += [(t, k) for t in range(251, 500) for k in range(500 - t)]
    held = [(t, t - 1) for t in range(1, 500)]
    poor = simulate(graph, None, Schedule(R=tuple(again), S_RAM=tuple(held)))
    assert poor.violations == ()
    assert poor.peak_ram_bytes == _largest_step(graph, again, held)


def _largest_step(
    graph: Graph, computed: Sequence[tuple[int, int]], held: Sequence[tuple[int, int]]
) -> int:
    """Return the peak of a schedule that holds one tensor into each stage and frees at once."""
    sizes = graph.tensor_bytes
    carried = dict(held)
    largest = 0
    for t, k in computed:
        inputs = set(graph.inputs_of[k])
        if t in carried:
            inputs.add(carried[t])
        largest = max(largest, sum(sizes[i] for i in inputs) + sizes[k])
    return largest
