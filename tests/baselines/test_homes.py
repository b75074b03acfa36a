"""Methods of earlier work on graphs with state: its homes, and what is left to them."""

from dataclasses import replace

import pytest

import poetmodel as pm
from kit.instances import random_costs, random_problem, random_step, seeded
from kit.worked import skip_problem, state, update
from poetmodel.baselines import METHODS, StateHomes, run
from poetmodel.baselines.capuchin import capuchin
from poetmodel.baselines.dtr import dtr
from poetmodel.baselines.homes import all_in_ram, all_on_storage
from poetmodel.baselines.paging import lru_paging, offload_all, zero_offload
from poetmodel.baselines.swap_advisor import swap_advisor
from poetmodel.device import Costs
from poetmodel.errors import MethodNotApplicableError
from poetmodel.graph import Graph, checkpoint_all_peak_bytes, operation
from poetmodel.planner import verify
from poetmodel.problem import Problem
from poetmodel.schedule import checkpoint_all, simulate

HEURISTICS = {name: entry for name, entry in METHODS.items() if not entry.by_solver}


def steps(count, seed):
    """Yield random training steps whose second half is a backward pass, some memory-mapped."""
    for number in range(count):
        rng = seeded(f"{seed}/{number}")
        graph = random_step(rng, (4, 9), flops=6)
        half = len(graph.nodes) // 2
        nodes = (
            replace(node, phase="backward") if k >= half and node.phase == "forward" else node
            for k, node in enumerate(graph.nodes)
        )
        graph = replace(graph, nodes=tuple(nodes))
        costs = random_costs(rng, graph)
        free = {node.name for node in graph.nodes if node.is_state}
        compute = {name: cost for name, cost in costs.compute.items() if name not in free}
        device = costs.device
        if device is not None and device.storage is not None and rng.random() < 0.3:
            device = replace(device, storage=replace(device.storage, memory_mapped=True))
        stated = Costs(compute=compute, pages=costs.pages, device=device)
        yield random_problem(rng, graph, stated, deadline=False, energy_budget=False)


def layers(*, ram="100%", mapped=False, **limits):
    """State a step of two layers, `f` reads `w` and `g` reads `v`, each updated in its own time.

    ====  ==========================  =================
    node  reads                       makes
    ====  ==========================  =================
    w                                 w, 8 bytes
    f     w                           f, 4 bytes
    v                                 v, 6 bytes
    g     f v                         g, 4 bytes
    df    f g v                       df, 4 bytes
    uv    df v                        replaces v
    uw    df w                        replaces w
    ====  ==========================  =================
    """
    graph = Graph(
        name="layers",
        nodes=(
            state("w", 8),
            operation("f", output_bytes=4, inputs=("w",)),
            state("v", 6),
            operation("g", output_bytes=4, inputs=("f", "v")),
            operation("df", output_bytes=4, inputs=("f", "g", "v"), phase="backward"),
            update("uv", "df", v=6),
            update("uw", "df", w=8),
        ),
    )
    costs = Costs.estimate(graph, pm.Device.load("nrf52840"))
    device = costs.device
    assert device.storage is not None
    device = replace(device, storage=replace(device.storage, memory_mapped=mapped))
    return Problem(graph, replace(costs, device=device), ram=ram, **limits)  # type: ignore[arg-type]


# -- every method ----------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("entry", HEURISTICS.values(), ids=HEURISTICS)
def test_schedules_are_valid_with_the_stated_homes_or_refused(entry):
    """On random training steps: within RAM by the simulator, or a reason."""
    made = 0
    for problem in steps(60, "homes"):
        try:
            schedule = run(problem, entry.name).schedule
        except MethodNotApplicableError:
            continue
        if schedule is None or not problem.graph.state_tensors:
            continue
        assert verify(problem, schedule).valid
        made += 1
        state = set(problem.graph.state_tensors)
        homes = {StateHomes.RAM: state, StateHomes.STORAGE: set[int]()}
        resident = set(schedule.resident)
        assert resident == homes.get(entry.state_homes, resident)
        assert resident <= state
    chains = ("griewank-walther", "rotor", "pofo")
    assert made > (0 if entry.name in chains else 5)


def test_with_all_state_in_ram_a_method_sees_the_rest():
    """The budget less the state is left, nothing waits for state, and updates weigh nothing.

    On storage its bytes are gone from a limit there.
    """
    seen = []

    def keep(problem):
        seen.append(problem)
        return checkpoint_all(problem.graph)

    problem = layers(ram=30)
    schedule = all_in_ram(keep)(problem)
    assert schedule == checkpoint_all(problem.graph)
    assert [plain.usable_ram_bytes for plain in seen] == [30 - 14]
    assert [plain.graph.state_tensors for plain in seen] == [()]
    assert checkpoint_all_peak_bytes(seen[0].graph) + 14 == checkpoint_all_peak_bytes(problem.graph)
    assert all_on_storage(keep)(layers(aux_bytes=20)).resident == ()
    assert seen[1].aux_limit_bytes == 6


@pytest.mark.parametrize("method", [capuchin, lru_paging, offload_all, swap_advisor])
def test_best_homes_are_taken(method):
    """State stays in RAM if it fits there, else `v` alone, which is read oftener for its bytes.

    Beside `v`, `f`, `g` and `df` take 12 of 18 bytes: `w` leaves, and comes again for its update.
    """
    roomy, short = layers(), layers(ram=18)
    assert set(method(roomy).resident) == set(roomy.graph.state_tensors)
    schedule = method(short)
    assert [short.graph.tensors[i].name for i in schedule.resident] == ["v"]
    assert schedule.M_in == ((6, 0),)
    assert verify(short, schedule).valid


@pytest.mark.parametrize(
    ("method", "limits", "words"),
    [
        (zero_offload, {"aux_bytes": 13}, "14 B, and there is room for 13 B"),
        (zero_offload, {"paging": False}, "allows no paging"),
        (capuchin, {"ram": "70%", "paging": False}, "at .df. 8 B more"),
        (dtr, {"ram": 14}, "all state in RAM, 14 B, and tensors may"),
        (lambda problem: run(problem, "resident"), {"ram": 18}, "'all state in RAM'"),
    ],
    ids=["storage", "no paging", "one home", "RAM", "resident"],
)
def test_homes_without_room_are_refused(method, limits, words):
    """The reason says what the state takes, or what is left of one home."""
    with pytest.raises(MethodNotApplicableError, match=words):
        method(layers(**limits))


def test_what_is_needed_after_its_state_was_replaced_is_refused():
    """A method that recomputes `a` after the update of what `a` reads is told why that is wrong."""
    graph = Graph(
        name="late",
        nodes=(
            state("w", 2),
            operation("a", output_bytes=4, inputs=("w",)),
            update("u", w=2),
            operation("b", output_bytes=6),
            operation("c", output_bytes=1, inputs=("a", "b")),
        ),
    )
    problem = Problem(graph, Costs.estimate(graph, pm.Device.load("nrf52840")), ram=12)

    def recompute(plain):
        kept = checkpoint_all(plain.graph)
        return replace(kept, R=(*kept.R, (4, 1)), S_RAM=((4, 3),))

    with pytest.raises(MethodNotApplicableError, match="has 'a' again at 'c', after state that"):
        all_in_ram(recompute)(problem)

    def page_in(plain):
        i, made = plain.graph.tensor_index["a"], plain.graph.node_index
        kept = checkpoint_all(plain.graph)
        stages = range(made["a"] + 1, made["c"] + 1)
        return replace(
            kept,
            S_RAM=tuple(pair for pair in kept.S_RAM if pair != (made["c"], i)),
            S_AUX=tuple((t, i) for t in stages),
            M_out=((made["a"], i),),
            M_in=((made["c"], i),),
        )

    larger = replace(problem, ram=13)
    assert pm.verify(larger, all_in_ram(page_in)(larger)).valid  # what is stored stays there


# -- state on storage ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("method", "page_ins", "peak_bytes"),
    [
        (zero_offload, ((6, 0),), 18),
        (all_on_storage(lru_paging.__wrapped__), (), 26),
    ],
)
def test_reads_of_state_by_hand(method, page_ins, peak_bytes):
    """`w` leaves after `f` and comes again for its update; `v` is in use all the while.

    While `df` is computed, `f`, `g`, `v` and `df` take 4 + 4 + 6 + 4 bytes, with `w` 8 more. Demand
    paging keeps both where there is room.
    """
    problem = layers()
    schedule = method(problem)
    assert (schedule.M_in, schedule.M_out) == (page_ins, ((5, 5), (6, 6)))
    found = simulate(problem.graph, problem.costs, schedule)
    assert found.valid
    assert (found.peak_ram_bytes, found.written_bytes) == (peak_bytes, 14)
    assert found.read_bytes == 14 + 8 * len(schedule.M_in)


def test_state_that_the_core_reads_on_storage_is_only_written():
    """State that the core reads on storage is only written: `f`, `g`, `df` take 12 bytes.

    Where it stands long before its reader it stays in RAM, and is not read twice.
    """
    problem = layers(mapped=True)
    for method in (zero_offload, all_on_storage(lru_paging.__wrapped__)):
        schedule = method(problem)
        found = simulate(problem.graph, problem.costs, schedule)
        assert (schedule.M_in, schedule.M_out) == ((), ((5, 5), (6, 6)))
        assert found.valid
        assert found.peak_ram_bytes == 12
    problem = layers()
    w, f, v, *rest = problem.graph.nodes
    graph = replace(problem.graph, nodes=(w, v, f, *rest))
    schedule = zero_offload(replace(problem, graph=graph))
    assert graph.tensor_index["v"] not in {i for _, i in schedule.M_in}


# -- the program with all state in RAM -------------------------------------------------------------
def test_resident_has_all_state_in_ram():
    """With RAM for all it is keep-all; without state it is the program itself."""
    problem = layers()
    found = run(problem, "resident")
    assert found.schedule.resident == problem.graph.state_tensors
    assert found.overhead_j == 0.0
    assert run(skip_problem(), "resident").overhead_j == run(skip_problem(), "optimal").overhead_j
    plain = skip_problem(ram="100%")
    assert zero_offload(plain) == checkpoint_all(plain.graph)


@pytest.mark.parametrize("name", ["chen-sqrt", "chen-greedy", "min-cut"])
def test_segments_end_before_the_first_update_even_where_forward_nodes_follow(name):
    """Forward nodes after an update, one of them on every path, belong to no segment."""
    nodes = (
        state("w", 2),
        operation("a", output_bytes=7, inputs=("w",)),
        update("u", "a", w=2),
        operation("b", output_bytes=1, inputs=("a",)),
        operation("c", output_bytes=9, inputs=("b",)),
    )
    graph = Graph(name="step", nodes=nodes)
    problem = Problem(graph, random_costs(seeded("segments"), graph), ram="100%")
    result = run(problem, name)
    assert verify(problem, result.require_schedule()).valid
