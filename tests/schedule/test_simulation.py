"""The simulator: hand-computed curves, every rule, times and energies, and a second opinion."""

from dataclasses import astuple, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.closed_form import simulate_in_closed_form
from kit.instances import make_rng, random_schedule, random_step
from kit.rotation import parametrize_parts
from kit.strategies import graphs
from kit.worked import bench_device, make_state_node, make_update_node, rename_graph
from poetmodel.device import Costs, Device
from poetmodel.errors import CostError
from poetmodel.graph import (
    Graph,
    Node,
    Phase,
    Tensor,
    checkpoint_all_peak_bytes,
    checkpoint_all_profile,
    operation,
)
from poetmodel.schedule import MemoryPoint, Schedule, checkpoint_all, simulate


def make(*nodes):
    """Return a graph of nodes."""
    return Graph(name="example", nodes=nodes)


def op(name, size, *inputs, **attributes):
    """Return a node with one tensor of its own name."""
    return operation(name, output_bytes=size, inputs=inputs, **attributes)


def once(graph):
    """Return `R` with one computation of every node."""
    return tuple((t, t) for t in range(len(graph.nodes)))


def curve(run):
    """Return the memory curve as plain tuples (stage, step, bytes)."""
    return [(point.stage, point.node, point.ram_bytes) for point in run.curve]


CHAIN = make(op("a", 10), op("b", 20, "a"), op("c", 30, "b"), op("d", 5, "c"))
SKIP = make(op("x", 8), op("y", 8, "x"), op("z", 8, "y"), op("w", 1, "z", "x"))
"""A chain whose first tensor is read again at its end."""


@pytest.fixture
def chain():
    """Return a chain of four."""
    return CHAIN


# -- hand-computed curves ----------------------------------------------------------------------
NORM = Node(
    name="bn",
    op="batch_norm",
    phase="forward",
    inputs=("x",),
    outputs=(Tensor(name="bn", bytes=8), Tensor(name="bn.mean", bytes=2)),
)
UPDATE = Node(name="update", op="sgd", phase="update", inputs=("g",), workspace_bytes=3)
SAMPLE = make(
    op("sample", 16, on_aux=True), op("c", 4, "sample"), op("d", 4, "c"), op("e", 1, "sample", "d")
)
BY_HAND = {
    # At (2,0) b=4 lies beside a=8, since the stage has not reached its step.
    "a shared input again": (
        make(op("a", 8), op("b", 4, "a"), op("c", 6, "a"), op("d", 2, "b", "c")),
        {"R": ((2, 0),), "S_RAM": ((1, 0), (2, 1), (3, 1), (3, 2))},
        [(0, 0, 8), (1, 1, 12), (2, 0, 12), (2, 2, 18), (3, 3, 12)],
        (0, 0, 0),
    ),
    # y+z=16 in stage 2, z+x=16 from the page-in on.
    "paged out at once and in at its use": (
        SKIP,
        {"S_RAM": ((1, 0), (2, 1), (3, 2)), "S_AUX": ((1, 0), (2, 0), (3, 0)),
         "M_in": ((3, 0),), "M_out": ((0, 0),)},
        [(0, 0, 8), (1, 1, 16), (2, 2, 16), (3, 0, 16), (3, 3, 17)],
        (8, 8, 8),
    ),
    # (2,2): x 8 + bn 8 + mean 2 + r 8; (3,1): x 8 + mean 2 + r 8 + new 8 + 2; (3,3): all but x.
    "both outputs again beside an old one": (
        make(op("x", 8), NORM, op("r", 8, "bn"), op("g", 8, "r", "bn", "bn.mean")),
        {"R": ((3, 1),), "S_RAM": ((1, 0), (2, 0), (2, 1), (2, 2), (3, 0), (3, 2), (3, 3))},
        [(0, 0, 8), (1, 1, 18), (2, 2, 26), (3, 1, 28), (3, 3, 26)],
        (0, 0, 0),
    ),
    # An update takes its input plus its workspace.
    "a node without outputs": (
        make(op("g", 7), UPDATE, op("h", 4, "g")),
        {"R": ((2, 1),), "S_RAM": ((1, 0), (2, 0))},
        [(0, 0, 7), (1, 1, 10), (2, 1, 10), (2, 2, 11)],
        (0, 0, 0),
    ),
    # What starts on storage takes no room there, written or not.
    "a sample": (
        SAMPLE,
        {"S_RAM": ((1, 0), (2, 1), (3, 2)), "S_AUX": ((3, 0),), "M_in": ((3, 0),)},
        [(0, 0, 16), (1, 1, 20), (2, 2, 8), (3, 0, 20), (3, 3, 21)],
        (0, 0, 16),
    ),
    # Space on storage is not reused, and twice paged out is twice written.
    "storage for each tensor once": (
        CHAIN,
        {"S_RAM": ((1, 0), (2, 1), (3, 2)), "M_out": ((0, 0), (1, 0), (1, 1), (2, 2))},
        [(0, 0, 10), (1, 0, 10), (1, 1, 30), (2, 2, 50), (3, 3, 35)],
        (60, 70, 0),
    ),
}  # fmt: skip
"""Graph, relations beside one computation of each node, curve, and bytes on storage, out and in."""


@pytest.mark.parametrize("case", BY_HAND)
def test_curves_by_hand(case):
    """Of equal points the first is the peak."""
    graph, relations, expected, moved = BY_HAND[case]
    again = relations.get("R", ())
    run = simulate(graph, None, Schedule(**{**relations, "R": (*once(graph), *again)}))
    assert run.violations == ()
    assert curve(run) == expected
    assert run.peak == max(expected, key=lambda point: point[2])
    assert (run.aux_used_bytes, run.written_bytes, run.read_bytes) == moved


# -- every rule --------------------------------------------------------------------------------
KEPT = ((1, 0), (2, 1), (3, 2))
ONCE = ((0, 0), (1, 1), (2, 2), (3, 3))


@pytest.mark.parametrize(
    ("relations", "violation"),
    [
        ({"R": ONCE[:3]}, "R[3,3]: node 'd' is not computed in its own stage"),
        ({"R": (*ONCE, (1, 2))}, "R[1,2]: node 'c' is first computed in stage 2"),
        ({"R": (*ONCE, (3, 4))}, "R[3,4]: the graph has no such stage or index"),
        ({"R": (*ONCE, (4, 0))}, "R[4,0]: the graph has no such stage or index"),
        ({"R": (*ONCE, (-1, 0))}, "R[-1,0]: the graph has no such stage or index"),
        ({"R": (*ONCE, (3, 1))}, "R[3,1]: node 'b' needs 'a' in RAM"),
        ({"S_RAM": KEPT[:2]}, "R[3,3]: node 'd' needs 'c' in RAM"),
        ({"S_RAM": (*KEPT, (3, 1))}, None),
        ({"S_RAM": (*KEPT, (3, 0))}, "S_RAM[3,0]: tensor 'a' is not in RAM when stage 3 begins"),
        ({"S_RAM": (*KEPT, (1, 1))}, "S_RAM[1,1]: tensor 'b' is first made in stage 1"),
        ({"S_RAM": (*KEPT, (1, 7))}, "S_RAM[1,7]: the graph has no such stage or index"),
        ({"S_AUX": ((2, 0),)}, "S_AUX[2,0]: tensor 'a' is not on storage when stage 2 begins"),
        ({"S_AUX": ((0, 0),)}, "S_AUX[0,0]: tensor 'a' is first made in stage 0"),
        (
            {"S_AUX": ((1, 0),), "M_out": ((1, 0),)},
            "S_AUX[1,0]: tensor 'a' is not on storage when stage 1 begins",
        ),
        ({"M_in": ((2, 0),)}, "M_in[2,0]: tensor 'a' is not on storage when stage 2 begins"),
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
def test_each_broken_rule_is_named(chain, relations, violation):
    """Exactly the broken rule is reported, with the entry, the name and the reason."""
    schedule = replace(Schedule(R=ONCE, S_RAM=KEPT), **relations)
    run = simulate(chain, None, schedule)
    assert run.violations == (() if violation is None else (violation,))
    assert run.valid == (violation is None)


def test_every_violation_is_reported(chain):
    """All violations of a schedule are reported, not only the first.

    A tensor that is claimed without being in RAM is no input of later steps. An empty schedule
    has four violations and a peak of 0. A non-recomputable node is computed once.
    """
    run = simulate(chain, None, Schedule(R=((0, 0), (1, 1), (2, 2)), M_out=((3, 0),)))
    assert len(run.violations) == 4
    assert [text.split(":")[0] for text in run.violations] == [
        "R[1,1]", "R[2,2]", "R[3,3]", "M_out[3,0]",
    ]  # fmt: skip
    run = simulate(chain, None, Schedule(R=ONCE, S_RAM=((2, 1), (3, 2), (1, 0), (2, 0), (3, 0))))
    assert run.valid
    run = simulate(chain, None, Schedule(R=ONCE, S_RAM=((1, 0), (2, 1), (3, 0), (3, 2))))
    assert [text.split(":")[0] for text in run.violations] == ["S_RAM[3,0]"]
    run = simulate(chain, None, Schedule(R=(*ONCE, (3, 1)), S_RAM=((1, 0), (2, 1), (3, 0), (3, 2))))
    assert [text.split(":")[0] for text in run.violations] == ["S_RAM[3,0]", "R[3,1]"]
    run = simulate(chain, None, Schedule(R=ONCE, S_RAM=KEPT, S_AUX=((2, 0),), M_in=((2, 0),)))
    assert [text.split(":")[0] for text in run.violations] == ["S_AUX[2,0]", "M_in[2,0]"]
    run = simulate(chain, None, Schedule(R=()))
    assert len(run.violations) == 4
    assert run.peak == MemoryPoint(0, 0, 0)
    assert run.peak_tensors == ()
    graph = make(op("drop", 4, recomputable=False), op("b", 1, "drop"))
    run = simulate(graph, None, Schedule(R=((0, 0), (1, 0), (1, 1))))
    assert run.violations == ("R[1,0]: node 'drop' must not be computed again",)


# -- times and energies ------------------------------------------------------------------------
def costs_of(graph, *, idle_power_w=0.0, mode="blocking"):
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
def busy():
    """Return a schedule of the chain with one recomputation of a, two page-outs, one page-in."""
    return Schedule(
        R=(*ONCE, (2, 0)),
        S_RAM=((1, 0), (2, 1), (3, 2)),
        S_AUX=((3, 1),),
        M_in=((3, 1),),
        M_out=((1, 1), (2, 2)),
    )


def test_times_and_energies_add_up(chain, busy):
    """1+2+3+4 and once more 1 s of compute; two page-outs and a page-in; every entry once."""
    run = simulate(chain, costs_of(chain), busy)
    assert run.violations == ()
    assert run.recomputations == {0: 1}
    assert (run.compute_s, run.transfer_s, run.time_s) == (11.0, 1.0, 12.0)
    assert run.energy_j == 5 * 10.0 + 3.0 + 2 * 4.0
    assert (run.baseline_energy_j, run.overhead_j) == (40.0, 21.0)


@pytest.mark.parametrize(
    ("counts", "time_s"), [("compute", 11.0), ("serial", 12.0), ("overlap", 12.0)]
)
def test_idle_power_is_charged_over_the_time_that_counts(chain, busy, counts, time_s):
    """2 W over compute time, or compute plus transfer; the baseline has one pass of 10 s."""
    run = simulate(chain, costs_of(chain, idle_power_w=2.0), busy, deadline_counts=counts)
    assert run.time_s == time_s
    assert run.energy_j == 61.0 + 2.0 * time_s
    assert run.baseline_energy_j == 40.0 + 2.0 * 10.0
    assert run.overhead_j == 21.0 + 2.0 * (time_s - 10.0)


def test_what_costs_do_not_tell_is_absent_or_refused(chain, busy):
    """Without costs memory and validity are checked and the rest is absent, not 0.

    Costs that know no storage cannot price a transfer; costs must name the nodes of the graph. An
    overhead 1e-15 of the baseline is not lost in the difference of two large numbers.
    """
    run = simulate(chain, None, busy)
    assert run.valid
    assert (run.compute_s, run.transfer_s, run.time_s) == (None, None, None)
    assert (run.energy_j, run.baseline_energy_j, run.overhead_j) == (None, None, None)
    costs = Costs.from_arrays(chain, compute_time_s=[1] * 4, compute_energy_j=[1] * 4)
    run = simulate(chain, costs, busy)
    assert run.violations == ("tensors are paged, but the costs have no auxiliary storage",)
    assert simulate(chain, costs, checkpoint_all(chain)).valid
    with pytest.raises(CostError, match="no compute costs for 'a', 'b', 'c', 'd'"):
        simulate(chain, costs_of(SKIP), checkpoint_all(chain))
    costs = Costs.from_arrays(chain, compute_time_s=[1] * 4, compute_energy_j=[1e-9, 1e6, 1e6, 1e6])
    run = simulate(chain, costs, Schedule(R=(*ONCE, (2, 0)), S_RAM=KEPT))
    assert run.overhead_j == 1e-9


# -- properties --------------------------------------------------------------------------------
SEEDS = st.integers(min_value=0, max_value=2**32)


@given(graph=graphs(on_aux=True))
@settings(deadline=None)
def test_checkpoint_all_has_the_profile_of_the_graph(graph):
    """Every node once, tensors to their last use: the simulator finds the graph's own profile."""
    run = simulate(graph, None, checkpoint_all(graph))
    assert run.violations == ()
    assert tuple(point.ram_bytes for point in run.curve) == checkpoint_all_profile(graph)
    assert run.peak_ram_bytes == checkpoint_all_peak_bytes(graph)


@given(graph=graphs(on_aux=True), seed=SEEDS)
@settings(deadline=None)
def test_names_change_nothing(graph, seed):
    """Other names in the same order have the same values."""
    schedule = random_schedule(make_rng(seed), graph)
    assert simulate(rename_graph(graph), None, schedule) == simulate(graph, None, schedule)


# -- size --------------------------------------------------------------------------------------
def deep(layers):
    """Return a forward chain of `layers` and the backward chain that reads it in reverse."""
    forward = [op(f"f{k}", 100 + k, *([f"f{k - 1}"] if k else [])) for k in range(layers)]
    backward = [
        op(f"b{k}", 100 + k, f"f{k}", *([f"b{k + 1}"] if k < layers - 1 else []))
        for k in reversed(range(layers))
    ]
    return make(*forward, *backward)


@pytest.mark.slow
def test_schedule_of_500_nodes_is_simulated():
    """Keeping all, and recomputing a whole forward pass for every backward step, at 500 nodes."""
    graph = deep(250)
    kept = simulate(graph, None, checkpoint_all(graph))
    assert kept.violations == ()
    assert kept.peak_ram_bytes == checkpoint_all_peak_bytes(graph)
    again = [(t, t) for t in range(500)]
    again += [(t, k) for t in range(251, 500) for k in range(500 - t)]
    held = [(t, t - 1) for t in range(1, 500)]
    poor = simulate(graph, None, Schedule(R=tuple(again), S_RAM=tuple(held)))
    assert poor.violations == ()
    assert poor.peak_ram_bytes == _largest_step(graph, again, held)


def _largest_step(graph, computed, held):
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


# -- what is in use at the peak ------------------------------------------------------------------
STEPS = 700
FLASH = Device.load("nano33ble")


def with_gradients(rng, graph):
    """Return the graph with some of its nodes in the backward pass."""
    nodes = (
        replace(node, phase=Phase.BACKWARD)
        if node.phase == Phase.FORWARD and rng.random() < 0.5
        else node
        for node in graph.nodes
    )
    return replace(graph, nodes=tuple(nodes))


@pytest.mark.parametrize("mapped", [False, True])
@parametrize_parts(3)
def test_kinds_are_those_of_a_second_simulator(part, *, mapped):
    """For random training steps, schedules and homes each kind at the peak is the same sum."""
    compared = 0
    for seed in part.select(range(STEPS)):
        rng = make_rng(f"peak-use/{mapped}/{seed}")
        graph = with_gradients(rng, random_step(rng, (3, 9)))
        schedule = random_schedule(rng, graph, mapped=mapped)
        if schedule is None:
            continue
        costs = Costs.estimate(graph, FLASH) if mapped else None
        found = simulate(graph, costs, schedule)
        assert found.valid
        blunt = simulate_in_closed_form(graph, schedule, mapped=mapped)
        assert astuple(found.peak_use) == tuple(blunt.kinds[found.peak[:2]].values()), seed
        assert found.peak_use.total_bytes == found.peak_ram_bytes
        compared += 1
    assert compared > part.divide(STEPS // 2)


def test_a_step_has_all_four_kinds():
    """By hand: 100 B of resident state, 8 of `y`, 3 of `dx`, 20 of workspace.

    `dw` (6 B) needs no bytes: it is written over `y`, which is used last here. `a` is kept and
    recomputed: 2 * 7 B of activations beside 4 of the step before.
    """
    nodes = (
        make_state_node("w", 100),
        operation("x", output_bytes=10),
        operation("y", output_bytes=8, inputs=("x", "w")),
        Node(
            name="dw",
            op="backward",
            phase=Phase.BACKWARD,
            inputs=("y",),
            outputs=(Tensor(name="dw", bytes=6), Tensor(name="dx", bytes=3)),
            workspace_bytes=20,
            in_place=(("dw", "y"),),
        ),
        make_update_node("u", "dw", w=100),
    )
    schedule = Schedule(
        R=tuple((t, t) for t in range(5)), S_RAM=((2, 1), (3, 2), (4, 3)), resident=(0,)
    )
    found = simulate(Graph(name="step", nodes=nodes), None, schedule)
    assert found.valid
    assert found.peak == (3, 3, 100 + 8 + (6 - 6) + 3 + 20)
    assert astuple(found.peak_use) == (100, 8, 3, 20)
    nodes = (operation("a", output_bytes=7), operation("b", output_bytes=4, inputs=("a",)))
    graph = Graph(name="pair", nodes=nodes)
    found = simulate(graph, None, Schedule(R=((0, 0), (1, 0), (1, 1)), S_RAM=((1, 0),)))
    assert found.valid
    assert found.peak == (1, 0, 14)
    assert astuple(found.peak_use) == (0, 14, 0, 0)
