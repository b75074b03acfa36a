"""Methods that page: gaps, demand paging, offloading, swaps, and homes of state."""

from dataclasses import replace
from functools import cache
from itertools import product

import pytest

import poetmodel as pm
from kit.baseline_checks import check_method
from kit.instances import make_rng, random_costs, random_instances, random_problem, random_step
from kit.rotation import mark_seeds_except, parametrize_parts
from kit.worked import (
    comb_graph,
    even_costs,
    gap_graph,
    make_state_node,
    make_update_node,
    parse_graph,
    skip_graph,
    skip_problem,
)
from poetmodel.baselines import METHODS, StateHomes, run
from poetmodel.baselines.capuchin import capuchin
from poetmodel.baselines.dtr import dtr
from poetmodel.baselines.homes import remove_state, use_homes
from poetmodel.baselines.paging import (
    IdleInterval,
    execute_evictions,
    find_idle_intervals,
    lru_paging,
    offload_all,
    page_least_recently_used,
    require_within_budget,
    zero_offload,
)
from poetmodel.baselines.swap_advisor import _GeneticSearch, swap_advisor
from poetmodel.device import Costs
from poetmodel.errors import InputError, MethodNotApplicableError
from poetmodel.graph import Graph, Phase, checkpoint_all_peak_bytes, floor, operation
from poetmodel.graph.zoo import MODELS
from poetmodel.planner import verify
from poetmodel.problem import Problem
from poetmodel.schedule import checkpoint_all, simulate


@pytest.mark.parametrize("page", [True, False])
def test_a_gap_is_paged_or_recomputed(page):
    """The tensor is out of RAM in the gap, and is restored as in the plan."""
    (gap,) = find_idle_intervals(skip_graph())
    assert gap == IdleInterval(0, 1, 3)
    schedule = execute_evictions(skip_problem(), {gap: page})
    assert (2, 0) not in schedule.S_RAM
    assert schedule.M_in == (((3, 0),) if page else ())
    assert ((3, 0) in schedule.R) is not page


def test_without_gaps_every_stage_holds_its_working_set():
    """With each tensor on storage in each gap, the peak is the minimum RAM.

    If that does not fit, the reason names the peak, its node and the budget.
    """
    for problem in random_instances(40, (3, 8), seed=42, zero_bytes=False):
        graph = problem.graph
        schedule = execute_evictions(problem, dict.fromkeys(find_idle_intervals(graph), True))
        assert simulate(graph, None, schedule).peak_ram_bytes == floor(graph).bytes
    graph = skip_graph()
    schedule = checkpoint_all(graph)
    assert require_within_budget(Problem(graph, even_costs(graph), ram=15), schedule) is schedule
    with pytest.raises(MethodNotApplicableError, match="needs 15 B at 'c', and tensors may use 14"):
        require_within_budget(Problem(graph, even_costs(graph), ram=14), schedule)


# -- demand paging ---------------------------------------------------------------------------------
def test_lru_hand_trace():
    """The tensor with the oldest use is evicted, and restored when read; the peak is the budget.

    ====  =====  =======  ===================================================================
    node  bytes  reads    in 8 bytes
    ====  =====  =======  ===================================================================
    a     2
    b     2
    c     2      a
    d     3               6 + 3: `b` goes, used in step 2; `a` was read in step 3
    e     1      a b      `b` comes: 7 + 2, `c` goes (step 3; `d` is of step 4); 7 + 1
    f     1      c d e    `c` comes: 4 + 2; 6 + 1
    ====  =====  =======  ===================================================================
    """
    graph = parse_graph("a 2; b 2; c 2 a; d 3; e 1 a b; f 1 c d e")
    schedule = lru_paging(Problem(graph, even_costs(graph), ram=8))
    assert (schedule.M_in, schedule.M_out) == (((4, 1), (5, 2)), ((1, 1), (2, 2)))
    kept = {1: (0,), 2: (0, 1), 3: (0, 2), 4: (0, 3), 5: (3, 4)}
    assert tuple((t, i) for t, inside in kept.items() for i in inside) == schedule.S_RAM
    assert all(t == k for t, k in schedule.R)
    assert simulate(graph, None, schedule).peak_ram_bytes == 8
    # It writes two tensors of 2 bytes: 4 bytes of storage are enough, 3 are not.
    assert lru_paging(Problem(graph, even_costs(graph), ram=8, aux_bytes=4)).M_in
    with pytest.raises(MethodNotApplicableError, match="the step 'b' on the way to 'e'"):
        lru_paging(Problem(graph, even_costs(graph), ram=8, aux_bytes=3))


# -- offloading ------------------------------------------------------------------------------------
def test_offload_hand_trace():
    """Two of three forward tensors wait on storage for their backward node; peak 4 + 4.

    Tensors of the forward pass itself are not moved: if they exceed the budget, the reason
    states their bytes.
    """
    graph = comb_graph(3)
    schedule = offload_all(Problem(graph, even_costs(graph), ram=8))
    assert (schedule.M_out, schedule.M_in) == (((0, 0), (1, 1)), ((4, 1), (5, 0)))
    assert schedule.S_RAM == ((1, 0), (2, 1), (3, 2), (4, 3), (5, 4))
    assert simulate(graph, None, schedule).peak_ram_bytes == 8
    graph = parse_graph("a 4; b 4 a; c 4 b; d 1 a c; g 1 d @backward")
    costs = even_costs(graph)
    assert offload_all(Problem(graph, costs, ram=12)).M_in == ()
    with pytest.raises(MethodNotApplicableError, match=r"needs 12 B at 'c'.* 11"):
        offload_all(Problem(graph, costs, ram=11))


@pytest.mark.parametrize(
    ("workspace", "page_ins"),
    [
        (2, ((2, 0),)),  # `h` takes 1 + 1 + 2 beside `f`: 8 bytes
        (3, ((2, 0), (4, 0))),  # 9 bytes: `f` must leave for it
    ],
)
def test_a_tensor_comes_in_once_or_for_each_reader(workspace, page_ins):
    """It stays from its first reader in the backward pass to the last if `h` has room beside it."""
    graph = Graph(
        name="twice",
        nodes=(
            operation("f", output_bytes=4),
            operation("loss", output_bytes=1, phase="loss"),
            operation("g", output_bytes=1, phase="backward", inputs=("f", "loss")),
            operation(
                "h", output_bytes=1, phase="backward", inputs=("g",), workspace_bytes=workspace
            ),
            operation("w", output_bytes=1, phase="update", inputs=("f", "h")),
        ),
    )
    schedule = offload_all(Problem(graph, even_costs(graph), ram=8))
    assert (schedule.M_out, schedule.M_in) == (((0, 0),), page_ins)


def test_offload_schedules_keep_the_budget_or_are_refused():
    """On random graphs whose second half is a backward pass: valid and within RAM, or a reason."""
    paged = 0
    for problem in random_instances(200, (4, 9), seed=71, resident=True):
        nodes = problem.graph.nodes
        half = len(nodes) // 2
        halves = (*nodes[:half], *(replace(node, phase="backward") for node in nodes[half:]))
        graph = replace(problem.graph, nodes=halves)
        costs = even_costs(graph)
        schedule = check_method(
            offload_all, Problem(graph, costs, ram=problem.ram_budget_bytes, paging=problem.paging)
        )
        paged += schedule is not None and bool(schedule.M_in)
    assert paged > 20


def _two_gaps(transfer_s, *, ram=9, **limits):
    """State a problem in which tensors must be out while `c` is computed.

    ====  =====  =====  =========  =================================================
    node  bytes  reads  computed   free time with transfers of x seconds each way
    ====  =====  =====  =========  =================================================
    a     4             0..1 s     until `e`: 13 - x - (1 + x) = 12 - 2 x
    b     4             1..2 s     until `d`: 12 - x - (2 + x) = 10 - 2 x
    c     5             2..12 s
    d     1      b      12..13 s
    e     1      a      13..14 s
    ====  =====  =====  =========  =================================================
    """
    graph = gap_graph()
    seconds = [1.0, 1.0, 10.0, 1.0, 1.0]
    pages = [(transfer_s, 1.0)] * 5
    costs = Costs.from_arrays(
        graph, compute_time_s=seconds, compute_energy_j=seconds, page_in=pages, page_out=pages
    )
    return Problem(graph, costs, ram=ram, **limits)  # type: ignore[arg-type]


def _left(problem, rule="published"):
    """Return which tensors a schedule swaps, and which it recomputes."""
    schedule = capuchin(problem, rule)
    return [i for _, i in schedule.M_in], [k for t, k in schedule.R if k < t]


def test_swaps_worked_by_hand():
    """With 5.5 s, `b` waits 1 s, the time of its recomputation: a swap. With 6 s, it waits 2 s.

    With 5 s on one channel, both must be evicted. `a` swaps: out 1..6 s, in 7..12 s of its 12
    s; free time 12 - 10 = 2. The gap of `b`, 2..12 s, has 4 + 5 s of that: 10 - 9 - 10 = -9, so
    recomputing in 1 s is less. The published rule counts a free time of 10 - 10 = 0, and swaps
    it, too. If transfers block, that rule pays 4 s more than the least of the three, which is
    selected for each problem.
    """
    assert _left(_two_gaps(5.5, ram=5)) == ([1, 0], [])
    assert _left(_two_gaps(6, ram=5)) == ([0], [1])
    problem = _two_gaps(5, ram=5, deadline_counts="overlap")
    assert _left(problem, "time") == ([0], [1])
    assert _left(problem, "published") == ([1, 0], [])
    problem = _two_gaps(1, deadline_counts="serial", minimize="time")
    by_rule = {
        rule: verify(problem, capuchin(problem, rule)).simulation.time_s
        for rule in ("published", "time", "energy")
    }
    assert by_rule == {"published": 16.0, "time": 15.0, "energy": 15.0}
    assert verify(problem, capuchin(problem)).simulation.time_s == 15.0


def test_unknown_rule_of_capuchin_is_refused():
    """The message lists the rules."""
    with pytest.raises(InputError, match="'fast': expected one of published, time, energy"):
        capuchin(_two_gaps(5), "fast")


def test_recomputation_that_does_not_fit_becomes_a_swap():
    """`b` is recomputed in 0 s, but its workspace does not fit beside `a`.

    Savings beyond the budget do not count: of `a` and `b`, 8 and 4 bytes, one must be evicted
    while `c` is 3 bytes above it. All bytes for 3 J and 2 J of recomputation: 8 / 3 J before 4
    / 2 J; needed are 3 bytes, and `b` saves these for less.
    """
    graph = parse_graph("b 4+6; a 4; c 5; d 1 a b")
    seconds = [0.0, 9.0, 1.0, 1.0]
    pages = [(9.0, 1.0)] * 4
    costs = Costs.from_arrays(
        graph, compute_time_s=seconds, compute_energy_j=seconds, page_in=pages, page_out=pages
    )
    problem = Problem(graph, costs, ram=10)
    assert _left(problem) == ([0], [])
    roomy = Graph(name="roomy", nodes=(operation("b", output_bytes=4), *graph.nodes[1:]))
    assert _left(Problem(roomy, costs, ram=10)) == ([], [0])
    graph = parse_graph("a 8; b 4; c 5; d 1 b; e 1 a")
    costs = Costs.from_arrays(
        graph, compute_time_s=[3.0, 2, 1, 1, 1], compute_energy_j=[3, 2, 1, 1, 1]
    )
    problem = Problem(graph, costs, ram=14, paging=False)
    assert _left(problem, "published") == ([], [0])
    assert _left(problem, "energy") == ([], [1])


@pytest.mark.parametrize(("ram", "again"), [(9, [0, 1]), (8, [0, 1, 0])])
def test_what_is_recomputed_for_others_stays_where_there_is_room(ram, again):
    """`d` needs `b`, and `b` needs `a`: with 4 + 4 + 1 bytes `a` stays until `e` reads it."""
    graph = parse_graph("a 4; b 4 a; c 6; d 1 b; e 1 a")
    problem = Problem(graph, even_costs(graph), ram=ram, paging=False)
    assert _left(problem) == ([], again)
    alone = capuchin(problem, refined=False)
    assert [k for t, k in alone.R if k < t] == [0, 1, 0]


# -- SwapAdvisor ---------------------------------------------------------------------------------
def _either(transfer_j, **limits):
    """State a problem in which `a` or `b` must be out while `c` is computed; `b` is read first."""
    graph = gap_graph()
    ones = [1.0] * 5
    pages = [(1.0, joules) for joules in (*transfer_j, 1.0, 1.0, 1.0)]
    costs = Costs.from_arrays(
        graph, compute_time_s=ones, compute_energy_j=ones, page_in=pages, page_out=pages
    )
    return Problem(graph, costs, ram=9, **limits)  # type: ignore[arg-type]


def test_hidden_transfers_are_free_by_hand():
    """The gap of `a` hides both of its transfers, 1.5 s each in 3 s; that of `b` 1 s of 2 s.

    So `a` is paged if only unhidden time counts, and `b` if all transfers count.
    """
    graph = gap_graph()
    ones = [1.0] * 5
    pages = [(seconds, 1.0) for seconds in (1.5, 1.0, 1.0, 1.0, 1.0)]
    costs = Costs.from_arrays(
        graph, compute_time_s=ones, compute_energy_j=ones, page_in=pages, page_out=pages
    )
    problem = Problem(graph, costs, ram=9, minimize="time", deadline_counts="overlap")
    added, hidden = (_GeneticSearch(problem, 0, hides_transfers=hidden) for hidden in (False, True))
    assert [interval.tensor for interval in added.search_intervals()] == [1]
    assert [interval.tensor for interval in hidden.search_intervals()] == [0]
    assert hidden.unhidden_s.tolist() == [0.0, 1.0]
    best = min(
        verify(problem, search.find_schedule()).simulation.time_s for search in (added, hidden)
    )
    assert verify(problem, swap_advisor(problem)).simulation.time_s == best


def test_best_of_all_swap_sets():
    """On small graphs it is as cheap as the cheapest of all sets of tensors that are paged."""
    compared = 0
    for problem in random_instances(
        60, 6, seed=81, recompute=False, paging=True, switches=False, deadline=False,
        energy_budget=False, aux_limit=False, minimize="energy",
    ):  # fmt: skip
        schedule = check_method(swap_advisor, problem)
        if schedule is None or not schedule.M_in:
            continue
        least = _least_overhead_j(problem)
        found = simulate(
            problem.graph, problem.costs, schedule, deadline_counts=problem.deadline_counts
        ).overhead_j
        assert found == pytest.approx(least, rel=1e-9)
        compared += 1
    assert compared > 8


def _least_overhead_j(problem):
    """Try every set of gaps, by the simulator."""
    gaps = find_idle_intervals(problem.graph)
    least = float("inf")
    for chosen in product((False, True), repeat=len(gaps)):
        plan = {gap: True for gap, out in zip(gaps, chosen, strict=True) if out}
        simulation = simulate(
            problem.graph,
            problem.costs,
            execute_evictions(problem, plan),
            deadline_counts=problem.deadline_counts,
        )
        if simulation.peak_ram_bytes <= problem.usable_ram_bytes:
            least = min(least, simulation.overhead_j or 0.0)
    return least


def test_storage_limit_is_heeded_where_it_can_be():
    """With storage for `b` alone, the search selects `b`, though `a` is cheaper to move."""
    graph = parse_graph("a 6; b 4; c 5; d 1 a b")
    ones = [1.0] * 4
    pages = [(1.0, 1.0), (1.0, 5.0), (1.0, 1.0), (1.0, 1.0)]
    costs = Costs.from_arrays(
        graph, compute_time_s=ones, compute_energy_j=ones, page_in=pages, page_out=pages
    )
    free = swap_advisor(Problem(graph, costs, ram=11))
    tight = swap_advisor(Problem(graph, costs, ram=11, aux_bytes=5))
    assert ([i for _, i in free.M_in], [i for _, i in tight.M_in]) == ([0], [1])


@pytest.mark.parametrize("minimize", ["time", "writes", "ram"])
def test_every_quantity_can_be_minimized(minimize):
    """The search minimizes the objective of the problem, within the budget."""
    assert swap_advisor(_either((1, 10), minimize=minimize)).M_in
    assert swap_advisor(_either((1, 10), minimize=minimize, deadline_counts="compute")).M_in


# -- homes of state ------------------------------------------------------------------------------
HEURISTICS = {name: entry for name, entry in METHODS.items() if not entry.uses_solver}


def steps(count, seed):
    """Yield random training steps whose second half is a backward pass, some memory-mapped."""
    for number in range(count):
        rng = make_rng(f"{seed}/{number}")
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
            make_state_node("w", 8),
            operation("f", output_bytes=4, inputs=("w",)),
            make_state_node("v", 6),
            operation("g", output_bytes=4, inputs=("f", "v")),
            operation("df", output_bytes=4, inputs=("f", "g", "v"), phase="backward"),
            make_update_node("uv", "df", v=6),
            make_update_node("uw", "df", w=8),
        ),
    )
    costs = Costs.estimate(graph, pm.Device.load("nrf52840"))
    device = costs.device
    assert device.storage is not None
    device = replace(device, storage=replace(device.storage, memory_mapped=mapped))
    return Problem(graph, replace(costs, device=device), ram=ram, **limits)  # type: ignore[arg-type]


# -- every method ----------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("name", mark_seeds_except(HEURISTICS, list(HEURISTICS)[::5]))
def test_schedules_are_valid_with_the_stated_homes_or_refused(name):
    """On random training steps: within RAM by the simulator, or a reason."""
    made, entry = 0, HEURISTICS[name]
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
        nodes = problem.graph.nodes
        recomputed = {nodes[k].phase for t, k in schedule.R if k < t}
        assert not entry.forward_only or recomputed <= {Phase.FORWARD}
    chains = ("griewank-walther", "rotor", "pofo")
    assert made > (0 if entry.name in chains else 5)


def test_with_all_state_in_ram_a_method_sees_the_rest():
    """The budget without the state is left, no transfer waits for state, and updates have no bytes.

    If state is on storage, its bytes reduce a limit there.
    """
    seen = []

    def keep(problem):
        seen.append(problem)
        return checkpoint_all(problem.graph)

    problem = layers(ram=30)
    schedule = use_homes(StateHomes.RAM)(keep)(problem)
    assert schedule == checkpoint_all(problem.graph)
    assert {plain.usable_ram_bytes for plain in seen} == {30 - 14}
    assert {plain.graph.state_tensors for plain in seen} == {()}
    assert checkpoint_all_peak_bytes(seen[0].graph) + 14 == checkpoint_all_peak_bytes(problem.graph)
    seen.clear()
    assert use_homes(StateHomes.STORAGE)(keep)(layers(aux_bytes=20)).resident == ()
    assert {plain.aux_limit_bytes for plain in seen} == {6}


@pytest.mark.parametrize("method", [capuchin, lru_paging, offload_all, swap_advisor])
def test_best_homes_are_taken(method):
    """State stays in RAM if it fits, else `v` alone, which has the most reads per byte.

    Beside `v`, `f`, `g` and `df` need 12 of 18 bytes: `w` is freed, and read again for its
    update.
    """
    roomy, short = layers(), layers(ram=18)
    assert set(method(roomy).resident) == set(roomy.graph.state_tensors)
    schedule = method(short)
    assert [short.graph.tensors[i].name for i in schedule.resident] == ["v"]
    assert schedule.M_in == ((6, 0),)
    assert verify(short, schedule).valid


@pytest.mark.parametrize(
    "name",
    mark_seeds_except(
        FILLING := ("lru-paging", "offload-all", "dtr-paging", "swap-advisor"), FILLING[:2], FILLING
    ),
)
def test_ram_is_filled_with_the_state_that_fits(name):
    """If a large moment does not fit, small tensors leave RAM, not all that follow it.

    With 97 % of the RAM for a step of Adam, the minimum overhead is 0.069 J.
    """
    graph = pm.zoo.mlp(state="adam")
    problem = Problem(graph, Costs.estimate(graph, pm.Device.load("nrf52840")), ram="97%")
    result = run(problem, name)
    assert result.overhead_j <= 0.08
    stored = set(graph.state_tensors) - set(result.require_schedule().resident)
    assert sum(graph.tensor_bytes[i] for i in stored) < 0.05 * graph.state_bytes


@pytest.mark.parametrize(
    ("method", "limits", "words"),
    [
        (zero_offload, {"aux_bytes": 13}, "14 B, and storage has space for 13 B"),
        (zero_offload, {"paging": False}, "allows no paging"),
        (capuchin, {"ram": "70%", "paging": False}, "at .df. 8 B more"),
        (dtr, {"ram": 14}, "all state in RAM, 14 B, and tensors may"),
        (lambda problem: run(problem, "resident"), {"ram": 18}, "'all state in RAM'"),
    ],
    ids=["storage", "no paging", "one home", "RAM", "resident"],
)
def test_homes_without_room_are_refused(method, limits, words):
    """The reason states the bytes of the state, or the bytes that remain of one home."""
    with pytest.raises(MethodNotApplicableError, match=words):
        method(layers(**limits))


def test_what_is_needed_after_its_state_was_replaced_is_refused():
    """A method that recomputes `a` after an update of its input is refused with the reason."""
    graph = Graph(
        name="late",
        nodes=(
            make_state_node("w", 2),
            operation("a", output_bytes=4, inputs=("w",)),
            make_update_node("u", w=2),
            operation("b", output_bytes=6),
            operation("c", output_bytes=1, inputs=("a", "b")),
        ),
    )
    problem = Problem(graph, Costs.estimate(graph, pm.Device.load("nrf52840")), ram=12)

    def recompute(plain):
        kept = checkpoint_all(plain.graph)
        return replace(kept, R=(*kept.R, (4, 1)), S_RAM=((4, 3),))

    with pytest.raises(MethodNotApplicableError, match="pages in 'a' at 'c', after an update"):
        use_homes(StateHomes.RAM)(recompute)(problem)

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

    larger = replace(problem, ram=13)  # what is stored stays there
    assert pm.verify(
        larger, use_homes(StateHomes.RAM)(page_in)(larger)
    ).valid  # what is stored stays there


def step_of(*nodes, ram="100%", name="step"):
    """State a problem of some nodes on a board."""
    graph = Graph(name=name, nodes=nodes)
    return Problem(graph, Costs.estimate(graph, pm.Device.load("nrf52840")), ram=ram)


def test_nodes_stay_recomputable_as_long_as_what_they_need_has_not_been_replaced():
    """`f` is read before `w` is replaced. `g`, and `d` which needs `f`, are read after it."""
    problem = step_of(
        make_state_node("w", 2),
        operation("f", output_bytes=4, inputs=("w",)),
        operation("g", output_bytes=3, inputs=("f", "w"), phase="backward"),
        operation("d", output_bytes=2, inputs=("f",), phase="backward"),
        make_update_node("uw", "d", "g", w=2),
        operation("e", output_bytes=1, inputs=("d", "g"), phase="backward"),
    )
    home = problem.graph.state_tensors
    once = {
        before_updates: [
            node.name
            for node in remove_state(problem, home, before_updates=before_updates).graph.nodes
            if not node.recomputable and node.phase == "backward"
        ]
        for before_updates in (True, False)
    }
    assert once == {True: ["g", "d"], False: []}


def kept_behind_an_update(**limits):
    """State a step in which `m` must leave for `k`: `g` is cheaper, but reads `w` before `uw`.

    ====  =========  ===============
    node  reads      makes
    ====  =========  ===============
    w                w, 2 bytes
    m                m, 4 bytes
    g     w          g, 4 bytes
    uw    g w        replaces w
    k                k, 8 bytes
    e     k          e, 1 byte
    z     g m e      z, 1 byte
    ====  =========  ===============
    """
    return step_of(
        make_state_node("w", 2),
        operation("m", output_bytes=4, flops=9_000_000),
        operation("g", output_bytes=4, inputs=("w",), phase="backward", flops=1_000),
        make_update_node("uw", "g", w=2),
        operation("k", output_bytes=8, phase="backward", recomputable=False),
        operation("e", output_bytes=1, inputs=("k",), phase="backward", recomputable=False),
        operation("z", output_bytes=1, inputs=("g", "m", "e"), phase="backward"),
        **limits,
    )


@pytest.mark.parametrize("name", ["dtr", "dtr:eq", "dtr:msps", "dtr:local", "dtr:liveness"])
def test_what_is_read_after_an_update_stays_in_ram(name):
    """`m` leaves and runs again for `z`, as `g` cannot."""
    result = run(kept_behind_an_update(ram=17), name)
    names = [node.name for node in result.problem.graph.nodes]
    schedule = result.require_schedule()
    assert [(names[t], names[k]) for t, k in schedule.R if t > k] == [("z", "m")]
    assert verify(result.problem, schedule).valid


@cache
def network_step(name):
    """Return a whole step of a network, with the costs of a board."""
    graph = MODELS[name](state="sgd", in_place=True, tile="32KiB")
    return Problem(graph, Costs.estimate(graph, pm.Device.load("nrf52840")), ram="100%")


@pytest.mark.parametrize(
    ("network", "share", "name"),
    [
        ("ds-cnn", 0.3, "dtr:liveness"),
        ("resnet8", 0.6, "dtr:liveness"),
        ("resnet8", 0.7, "dtr:msps"),
        ("resnet8", 0.7, "dtr"),
        ("resnet8", 0.7, "rotor"),
    ],
)
def test_no_method_is_refused_for_what_was_replaced(network, share, name):
    """On the step of a network the schedule is valid, or too large."""
    stated = network_step(network)
    least, most = stated.floor.bytes, checkpoint_all_peak_bytes(stated.graph)
    problem = replace(stated, ram=int(least + share * (most - least)))
    try:
        assert verify(problem, run(problem, name).require_schedule()).valid
    except MethodNotApplicableError as error:
        assert "was replaced" not in str(error)  # noqa: PT017 - either outcome is fine


@pytest.mark.parametrize("again", ["uw", "z"])
@pytest.mark.parametrize("better", [True, False])
def test_better_schedule_counts_if_a_node_could_run_too_late(again, better):
    """A method may recompute `g` for `uw`, not for `z`, unless its safe schedule is as good."""

    def method(plain):
        names = plain.graph.node_index
        kept = checkpoint_all(plain.graph)
        more = (names["z"], names["m"])
        if plain.graph.nodes[names["g"]].recomputable:
            more = (names[again], names["g"])
        elif not better:
            return kept
        tensor = plain.graph.tensor_index[plain.graph.nodes[more[1]].name]
        return replace(
            kept,
            R=tuple(sorted((*kept.R, more))),
            S_RAM=tuple(pair for pair in kept.S_RAM if pair != (more[0], tensor)),
        )

    problem = kept_behind_an_update()
    found = use_homes(StateHomes.RAM)(method)(problem)
    names = [node.name for node in problem.graph.nodes]
    recomputed = [(names[t], names[k]) for t, k in found.R if t > k]
    safe = [("z", "m")] if better else []
    assert recomputed == ([("uw", "g")] if better and again == "uw" else safe)


@pytest.mark.parametrize(("forward_only", "versions"), [(True, 1), (False, 2)])
def test_method_that_recomputes_forward_nodes_alone_schedules_once(forward_only, versions):
    """It gets the version of the graph in which every recomputation is in time."""
    seen = []

    def keep(plain):
        seen.append(plain.graph.nodes[2].recomputable)
        return checkpoint_all(plain.graph)

    use_homes(StateHomes.RAM, forward_only=forward_only)(keep)(kept_behind_an_update())
    assert seen == [False, True][:versions]


# -- nodes that write over an input which is read later --------------------------------------------
def overwriting(*, adjacent=False, **limits):
    """State a chain `x`, `y`, `v`, `z`: `y` may write over `x`, which `z` reads with `y` alone.

    ====  =====  =====
    node  reads  makes
    ====  =====  =====
    x            x, 5 bytes
    y     x      y, 5 bytes, in place
    v     y      v, 5 bytes
    z     x v    z, 1 byte
    ====  =====  =====

    `y` has 2 bytes of workspace. If `adjacent`, `z` reads `y` and comes right after it.
    """
    between = () if adjacent else (operation("v", output_bytes=5, inputs=("y",)),)
    return step_of(
        operation("x", output_bytes=5, recomputable=False),
        operation("y", output_bytes=5, inputs=("x",), in_place={"y": "x"}, workspace_bytes=2),
        *between,
        operation("z", output_bytes=1, inputs=("x", "y" if adjacent else "v")),
        **limits,
    )


@pytest.mark.parametrize("adjacent", [False, True])
@pytest.mark.parametrize("name", ["lru-paging", "dtr-paging", "capuchin", "swap-advisor"])
def test_node_writes_over_an_input_that_comes_back(name, adjacent):
    """Beside the workspace of `y` storage has space for one of both; `x` is paged in for `z`."""
    result = run(overwriting(ram=11, adjacent=adjacent), name)
    schedule = result.require_schedule()
    assert verify(result.problem, schedule).valid
    assert schedule.M_in == ((len(result.problem.graph.nodes) - 1, 0),)
    assert run(overwriting(ram=17, adjacent=adjacent), name).overhead_j == 0


@pytest.mark.parametrize(
    "name",
    ["lru-paging", "dtr-paging", "capuchin", pytest.param("swap-advisor", marks=pytest.mark.slow)],
)
@parametrize_parts(3)
def test_least_ram_is_enough_on_storage(name, part):
    """With all state on storage, and nodes that write over inputs, the least RAM is enough."""
    tried = 0
    for problem in part.select(steps(25, "least")):
        if problem.can_page and problem.graph.state_tensors:
            ram = max(1, problem.floor.bytes) + problem.resident_bytes
            least = replace(problem, ram=ram, aux_bytes=None)
            assert run(least, name).schedule is not None
            tried += any(problem.graph.shared_bytes_of)
    assert tried > part.divide(3)


# -- state on storage ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("method", "page_ins", "peak_bytes"),
    [
        (zero_offload, ((6, 0),), 18),
        (use_homes(StateHomes.STORAGE)(page_least_recently_used), (), 26),
    ],
)
def test_reads_of_state_by_hand(method, page_ins, peak_bytes):
    """`w` is freed after `f` and read again for its update; `v` is in use throughout.

    While `df` is computed, `f`, `g`, `v` and `df` need 4 + 4 + 6 + 4 bytes, with `w` 8 more.
    Demand paging keeps both if they fit.
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
    for method in (zero_offload, use_homes(StateHomes.STORAGE)(page_least_recently_used)):
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
        make_state_node("w", 2),
        operation("a", output_bytes=7, inputs=("w",)),
        make_update_node("u", "a", w=2),
        operation("b", output_bytes=1, inputs=("a",)),
        operation("c", output_bytes=9, inputs=("b",)),
    )
    graph = Graph(name="step", nodes=nodes)
    problem = Problem(graph, random_costs(make_rng("segments"), graph), ram="100%")
    result = run(problem, name)
    assert verify(problem, result.require_schedule()).valid
