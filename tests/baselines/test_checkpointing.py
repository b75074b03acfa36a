"""Checkpoints along a chain: revolve, rotor, and POFO, which offloads too."""

import heapq
import itertools
import math

import pytest

from kit.instances import make_rng
from kit.rotation import mark_seeds_except
from kit.transcriptions import Layer, Rotor, chain_graph, node_times_s, random_layers
from kit.worked import chain_costs, training_chain
from poetmodel.baselines.chain import Chain
from poetmodel.baselines.checkpointing import (
    ChainTable,
    griewank_walther,
    min_forward_steps,
    revolve,
    rotor,
)
from poetmodel.baselines.paging import CostRule
from poetmodel.baselines.pofo import (
    Action,
    ActionPrefix,
    build_layers,
    build_schedule,
    pofo,
    search_actions,
)
from poetmodel.errors import InputError, MethodNotApplicableError
from poetmodel.graph import Graph, checkpoint_all_peak_bytes, floor, operation
from poetmodel.planner import verify
from poetmodel.problem import Problem
from poetmodel.schedule import check_schedule, simulate

LENGTHS = range(1, 11)


def least_steps(length, slots):
    """Return the fewest forward steps by trying everything: states are (stored, at, left).

    `stored` holds the positions whose state is stored (0 always), `at` is the position of the
    state at hand, `left` the steps that are not reversed yet. The last of these is reversed from
    the state before it, which takes no forward step.
    """
    queue = [(0, frozenset({0}), 0, length)]
    seen = set()
    while queue:
        steps, stored, at, left = heapq.heappop(queue)
        if left == 0:
            return steps
        if (stored, at, left) in seen:
            continue
        seen.add((stored, at, left))
        if at == left - 1:
            heapq.heappush(queue, (steps, frozenset(s for s in stored if s < left), at, left - 1))
        if at + 1 < left:
            heapq.heappush(queue, (steps + 1, stored, at + 1, left))
        if at not in stored and at < left and len(stored) < slots:
            heapq.heappush(queue, (steps, stored | {at}, at, left))
        for s in stored - {at}:
            heapq.heappush(queue, (steps, stored, s, left))
        for s in stored - {0}:
            heapq.heappush(queue, (steps, stored - {s}, at, left))
    raise AssertionError


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_closed_form_is_the_least_number_of_steps(slots):
    """No order of forward steps and checkpoints has fewer forward steps than the closed form."""
    found = [min_forward_steps(length, slots) for length in LENGTHS]
    assert found == [least_steps(length, slots) for length in LENGTHS]


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 10])
@pytest.mark.parametrize("length", LENGTHS)
def test_schedule_takes_the_steps_of_the_closed_form(length, slots):
    """On a chain whose gradients read the state before a layer, forward steps are the closed form.

    The last layer's one computation is beside it: revolve reverses it from the state before it.
    """
    graph = training_chain([1] * (length + 1), reads_own=False, loss=False)
    if length == 1:
        with pytest.raises(MethodNotApplicableError, match="single step"):
            Chain(graph)
        return
    schedule = revolve(Chain(graph), slots)
    assert simulate(graph, None, schedule).valid
    layers = sum(graph.nodes[k].phase == "forward" for _, k in schedule.R)
    assert layers - 1 == min_forward_steps(length, slots)


@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_no_more_states_than_slots_are_kept(slots):
    """Between the parts of the backward pass there are at most as many states as slots.

    At the turn there is one more: the state that the forward pass has at hand.
    """
    graph = training_chain([1] * 12, reads_own=False, loss=False)
    schedule = revolve(Chain(graph), slots)
    states = {i for i, k in enumerate(graph.node_of) if graph.nodes[k].phase != "backward"}
    begin = next(k for k, node in enumerate(graph.nodes) if node.phase == "backward")
    kept = [sum((t, i) in schedule.S_RAM for i in states) for t in range(begin, len(graph.nodes))]
    assert kept[0] == slots + 1
    assert max(kept[1:]) == slots


def test_slots_follow_from_the_budget():
    """All slots at 100 %, the most that fit below, and an error where one slot is too much."""
    graph = training_chain([1] * 11)
    costs = chain_costs(graph)
    spent = []
    for ram in ("100%", 9, 7, 5):
        problem = Problem(graph, costs, ram=ram)
        schedule = griewank_walther(problem)
        assert check_schedule(problem, schedule).valid
        spent.append(len(schedule.R))
    assert spent[0] == len(graph.nodes)
    assert spent == sorted(spent)
    assert len(set(spent)) == 4
    with pytest.raises(MethodNotApplicableError, match="one slot"):
        griewank_walther(Problem(graph, costs, ram=3))


def test_graph_that_is_no_chain_is_refused():
    """A backward pass in the order of the forward pass is not bent into a chain."""
    graph = training_chain([1] * 5)
    nodes = list(graph.nodes)
    moved = operation("late", output_bytes=1, phase="backward", inputs=("f4", "f1", "g1"))
    bent = Graph(name="bent", nodes=(*nodes, moved))
    with pytest.raises(MethodNotApplicableError, match=r"no chain.*'late'"):
        Chain(bent)
    with pytest.raises(MethodNotApplicableError, match="no backward pass"):
        Chain(Graph(name="forward", nodes=tuple(nodes[:5])))


def test_state_is_freed_and_recomputed_where_it_takes_too_much():
    """On tight chains, it finds a schedule if one exists that frees states as revolve does."""
    only_freed = 0
    for seed in range(20):
        rng = make_rng(f"revolve/{seed}")
        graph = chain_graph(random_layers(rng, rng.randint(3, 7)))
        chain, costs = Chain(graph), chain_costs(graph)
        slots = range(1, len(chain.steps) + 1)
        least = [
            min(
                simulate(graph, None, revolve(chain, n, frees_states=freed)).peak_ram_bytes
                for n in slots
            )
            for freed in (False, True)
        ]
        only_freed += least[1] < least[0]
        problem = Problem(graph, costs, ram=min(least), paging=False)
        schedule = griewank_walther(problem)
        assert check_schedule(problem, schedule).valid
        with pytest.raises(MethodNotApplicableError, match="with one slot it needs"):
            griewank_walther(Problem(graph, costs, ram=min(least) - 1, paging=False))
    assert only_freed > 0


def persistent(chain):
    """Yield every way to hold tensors of a chain that stay until their own part.

    When a part of the backward pass begins, its tape is made; on the way from the nearest state
    held, any of the steps passed may leave its state for the parts behind it, or its tape and state
    where the state before it is left too: a part reads both.
    """
    steps = chain.steps

    def parts(s, held):
        """Yield the tensors stored at parts ``s, s-1, ...``, from those stored of each step."""
        if s < 0:
            yield {}
            return
        known = max((j for j in range(s) if steps[j].state <= held.get(j, frozenset())), default=-1)
        passed = [j for j in range(known + 1, s) if j not in held]
        ways = [(frozenset[int](), steps[j].state, steps[j].state | steps[j].tape) for j in passed]
        for chosen in itertools.product(*ways):
            now = dict(held) | {j: c for j, c in zip(passed, chosen, strict=True) if c}
            if any(steps[j].tape & now[j] and j > 0 and j - 1 not in now for j in now if j < s):
                continue
            now.pop(s, None)
            whole = frozenset(steps[s].tape).union(*now.values())
            for rest in parts(s - 1, now):
                yield {s: whole, **rest}

    yield from parts(len(steps) - 1, {})


def outcomes(costs, chain):
    """Return peak and compute time of every persistent schedule, by the simulator."""
    simulations = [
        simulate(chain.graph, costs, chain.to_schedule(held)) for held in persistent(chain)
    ]
    return [(simulation.peak_ram_bytes, simulation.compute_s or 0.0) for simulation in simulations]


@pytest.mark.slow
@pytest.mark.parametrize("seed", mark_seeds_except(range(6), range(2)))
def test_no_persistent_schedule_is_quicker(seed):
    """At each budget, the compute time is the minimum of all persistent schedules, if any."""
    rng = make_rng(f"rotor/{seed}")
    graph = training_chain(
        [rng.randint(1, 5) for _ in range(5)],
        tapes=[rng.randint(1, 5) for _ in range(4)],
        workspaces=[rng.choice((0, 0, 12)) for _ in range(4)],
        gradient_bytes=2,
        reads_own=rng.random() < 0.7,
    )
    costs = chain_costs(graph, seconds=[rng.randint(1, 9) for _ in graph.nodes])
    every = outcomes(costs, Chain(graph))
    for ram in range(floor(graph).bytes, checkpoint_all_peak_bytes(graph) + 1, 3):
        problem = Problem(graph, costs, ram=ram)
        best = min((time for peak, time in every if peak <= ram), default=None)
        if best is None:
            with pytest.raises(MethodNotApplicableError, match="no persistent schedule"):
                rotor(problem)
            continue
        schedule = rotor(problem)
        assert check_schedule(problem, schedule).valid
        assert simulate(graph, costs, schedule).compute_s == best


def published(layers, costs):
    """Return peak and compute time of the published sequence for every memory, simulated."""
    reference, last = Rotor(layers), len(layers) - 1
    found = []
    for m in range(checkpoint_all_peak_bytes(reference.graph) + 20):
        schedule = reference.find_schedule(m)
        if schedule is None:
            continue
        simulation = simulate(reference.graph, costs, schedule)
        assert simulation.violations == ()
        assert simulation.peak_ram_bytes <= m + 1  # the sample is beside `m`
        assert simulation.compute_s == reference.cost(m, 0, last)[0]
        found.append((simulation.peak_ram_bytes, simulation.compute_s or 0.0))
    return found


def check_against_published(layers):
    """Check that `rotor` is as quick as the published sequences; return how often it is quicker."""
    graph = chain_graph(layers)
    costs = chain_costs(graph, seconds=node_times_s(layers))
    sequences = published(layers, costs)
    quicker = 0
    for ram in range(min(peak for peak, _ in sequences), checkpoint_all_peak_bytes(graph) + 1):
        best = min(time_s for peak, time_s in sequences if peak <= ram)
        ours = simulate(graph, costs, rotor(Problem(graph, costs, ram=ram, paging=False)))
        assert ours.peak_ram_bytes <= ram
        assert ours.compute_s <= best
        quicker += ours.compute_s < best
    return quicker


@pytest.mark.parametrize(
    ("begin", "end", "most"),
    [
        pytest.param(0, 8, 6, marks=pytest.mark.slow),
        *(pytest.param(b, b + 6, 9, marks=pytest.mark.seeds) for b in range(8, 440, 6)),
    ],
)
def test_no_published_sequence_is_quicker(begin, end, most):
    """At every budget of one `rotor` is at least as quick: chains of 2 to 9 layers."""
    quicker = 0
    for seed in range(begin, end):
        rng = make_rng(f"published rotor/{seed}")
        quicker += check_against_published(random_layers(rng, rng.randint(2, most)))
    assert quicker > 0 or begin > 0


def test_state_that_is_a_tape_may_be_freed_and_recomputed():
    """In 25 B, each state must be freed before its own step's part; 120 s is the proven optimum.

    The published sequence needs 123 s: it recomputes each state, also those that fit.
    """
    # Forward and backward [s], activation and gradient [B].
    rows = ("7 1 5 1", "6 9 5 5", "8 7 4 5", "3 9 2 4", "5 3 9 2", "3 9 3 9")
    keys = ("forward_s", "backward_s", "activation_bytes", "gradient_bytes")
    layers = [Layer(**dict(zip(keys, map(int, row.split()), strict=True))) for row in rows]
    loss = Layer(forward_s=0, backward_s=0, activation_bytes=0, reads_own=False, gradient_bytes=3)
    chain = [*layers, loss]
    graph = chain_graph(chain)
    costs = chain_costs(graph, seconds=node_times_s(chain))
    assert min(time for peak, time in published(chain, costs) if peak <= 25) == 123
    simulation = simulate(graph, costs, rotor(Problem(graph, costs, ram=25, paging=False)))
    assert (simulation.peak_ram_bytes, simulation.compute_s) == (25, 120)


# -- POFO ----------------------------------------------------------------------------------------
STAYING = (Action.KEEP, Action.OFFLOAD)


def planned_s(problem, table, actions):
    """Return the makespan of the plan for some actions; None if they need too much RAM."""
    schedule = build_schedule(table, ActionPrefix(actions=actions))
    simulation = verify(problem, schedule).simulation
    fits = simulation.peak_ram_bytes <= problem.usable_ram_bytes
    return simulation.makespan_s if fits else None


@pytest.mark.slow
@pytest.mark.parametrize("seed", mark_seeds_except(range(8), range(2)))
def test_no_choice_of_actions_is_quicker(seed):
    """The plan of the layers that are offloaded is as quick as that of the best combination.

    The time counted by the method is never below that of the plan.
    """
    rng = make_rng(f"pofo/{seed}")
    graph = training_chain(
        [rng.randint(1, 5) for _ in range(4)], gradient_bytes=2, reads_own=rng.random() < 0.7
    )
    costs = chain_costs(graph, seconds=[rng.randint(1, 6) for _ in graph.nodes])
    for ram in range(floor(graph).bytes, checkpoint_all_peak_bytes(graph) + 1, 2):
        problem = Problem(graph, costs, ram=ram, deadline_counts="overlap", recompute=False)
        table = ChainTable(problem)
        every = itertools.product(STAYING, repeat=len(table.chain.steps) - 1)
        times = [planned_s(problem, table, (*actions, Action.KEEP)) for actions in every]
        least = min((time for time in times if time is not None), default=None)
        layers = tuple(build_layers(problem, table.chain, CostRule.PUBLISHED))
        found = search_actions(layers, ram, STAYING, lambda *_: math.inf)
        if found is None:
            assert least is None
            continue
        planned = planned_s(problem, table, found.actions)
        assert planned == least
        assert found.total_cost >= planned


@pytest.mark.parametrize("seed", mark_seeds_except(range(6), range(1)))
def test_offloading_is_no_worse_than_none(seed):
    """With runs by rotor, and rotor itself among its choices, it pays no more than rotor."""
    rng = make_rng(f"pofo runs/{seed}")
    graph = training_chain([rng.randint(1, 6) for _ in range(7)], gradient_bytes=1)
    costs = chain_costs(graph, seconds=[rng.randint(1, 9) for _ in graph.nodes], page_s=30)
    for ram in range(floor(graph).bytes + 1, checkpoint_all_peak_bytes(graph), 3):
        problem = Problem(graph, costs, ram=ram, deadline_counts="serial", minimize="time")
        try:
            without = verify(problem, rotor(problem)).simulation
        except MethodNotApplicableError:
            continue
        chosen = verify(problem, pofo(problem)).simulation
        assert chosen.time_s <= without.time_s
        alone = verify(problem, pofo(problem, "time")).simulation
        assert alone.time_s <= without.time_s * 1.05


def test_quick_transfers_are_hidden_and_slow_ones_avoided():
    """Below keep-all, cheap storage is used; expensive storage is replaced by recomputation."""
    graph = training_chain([2] * 7)
    seconds = [10] * len(graph.nodes)
    problem = Problem(
        graph, chain_costs(graph, seconds=seconds), ram="70%", deadline_counts="overlap"
    )
    schedule = pofo(problem)
    assert schedule.M_out
    assert verify(problem, schedule).simulation.makespan_s == problem.pass_time_s
    costs = chain_costs(graph, page_s=50)
    slow = Problem(graph, costs, ram="70%", deadline_counts="overlap")
    assert not pofo(slow).M_out
    without = Problem(graph, chain_costs(graph), ram="70%", paging=False)
    assert not pofo(without).M_out
    single = Problem(
        graph, chain_costs(graph), ram="70%", recompute=False, deadline_counts="serial"
    )
    assert verify(single, pofo(single)).valid


def test_unknown_rule_of_pofo_is_refused():
    """The message lists the rules, also for a graph that is no chain."""
    graph = Graph(
        name="two ends",
        nodes=tuple(operation(name, output_bytes=1) for name in ("first", "second")),
    )
    for each in (graph, training_chain([2] * 7)):
        problem = Problem(each, chain_costs(each), ram=100)
        with pytest.raises(InputError, match="'fast': expected one of published, time, energy"):
            pofo(problem, "fast")
