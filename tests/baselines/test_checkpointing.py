"""Checkpoints along a chain: rotor."""

import itertools

import pytest

from kit.instances import seeded
from kit.transcriptions import Layer, Rotor, chain_graph, random_layers, seconds
from kit.worked import chain_costs, training_chain
from poetmodel.baselines.chain import Chain
from poetmodel.baselines.checkpointing import rotor
from poetmodel.errors import MethodNotApplicableError
from poetmodel.graph import Graph, checkpoint_all_peak_bytes, floor, operation
from poetmodel.problem import Problem
from poetmodel.schedule import check_schedule, simulate


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


def persistent(chain):
    """Yield every way to hold tensors of a chain that stay until their own part.

    When a part of the backward pass begins, its tape is made; on the way from the nearest state
    held, any of the steps passed may leave its state for the parts behind it, or its tape and state
    where the state before it is left too: a part reads both.
    """
    steps = chain.steps

    def parts(s, held):
        """Yield what is held as parts ``s, s-1, ...`` begin, given what is held of each step."""
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
    simulations = [simulate(chain.graph, costs, chain.realize(held)) for held in persistent(chain)]
    return [(simulation.peak_ram_bytes, simulation.compute_s or 0.0) for simulation in simulations]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_no_persistent_schedule_is_quicker(seed):
    """At every budget the compute time is that of an exhaustive search, or both find nothing."""
    rng = seeded(f"rotor/{seed}")
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
        schedule = reference.sequence(m)
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
    costs = chain_costs(graph, seconds=seconds(layers))
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
        rng = seeded(f"published rotor/{seed}")
        quicker += check_against_published(random_layers(rng, rng.randint(2, most)))
    assert quicker > 0 or begin > 0


def test_state_that_is_a_tape_may_be_freed_and_recomputed():
    """In 25 B every state must leave before its own step's part; 120 s is the proven optimum.

    The published sequence takes 123 s: it makes every state again, also where it could stay.
    """
    # Forward and backward [s], activation and gradient [B].
    rows = ("7 1 5 1", "6 9 5 5", "8 7 4 5", "3 9 2 4", "5 3 9 2", "3 9 3 9")
    keys = ("forward_s", "backward_s", "activation_bytes", "gradient_bytes")
    layers = [Layer(**dict(zip(keys, map(int, row.split()), strict=True))) for row in rows]
    loss = Layer(forward_s=0, backward_s=0, activation_bytes=0, reads_own=False, gradient_bytes=3)
    chain = [*layers, loss]
    graph = chain_graph(chain)
    costs = chain_costs(graph, seconds=seconds(chain))
    assert min(time for peak, time in published(chain, costs) if peak <= 25) == 123
    simulation = simulate(graph, costs, rotor(Problem(graph, costs, ram=25, paging=False)))
    assert (simulation.peak_ram_bytes, simulation.compute_s) == (25, 120)
