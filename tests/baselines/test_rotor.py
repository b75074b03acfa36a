"""Rotor finds the best persistent schedule of a chain."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from chains import chain_costs, random_training_graph, training_chain
from instances import seeded
from poetmodel.baselines.chain import Chain
from poetmodel.baselines.rotor import rotor
from poetmodel.errors import MethodNotApplicableError
from poetmodel.graph import checkpoint_all_peak_bytes, floor
from poetmodel.problem import Problem
from poetmodel.schedule import simulate, verify

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.device import Costs


def persistent(chain: Chain) -> Iterator[dict[int, frozenset[int]]]:
    """Yield every way to hold tensors of a chain that stay until their own part.

    When a part of the backward pass begins, its tape is made; on the way from the nearest state
    held, any of the steps passed may leave its state for the parts behind it, or its tape and state
    where the state before it is left too: a part reads both.
    """
    steps = chain.steps

    def parts(s: int, held: dict[int, frozenset[int]]) -> Iterator[dict[int, frozenset[int]]]:
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


def outcomes(costs: Costs, chain: Chain) -> list[tuple[int, float]]:
    """Return peak and compute time of every persistent schedule, as the judge finds them."""
    walks = [simulate(chain.graph, costs, chain.realize(held)) for held in persistent(chain)]
    return [(walk.peak_ram_bytes, walk.compute_s or 0.0) for walk in walks]


@pytest.mark.parametrize("seed", range(6))
def test_no_persistent_schedule_is_quicker(seed: int) -> None:
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
    every = outcomes(costs, Chain.of(graph))
    for ram in range(floor(graph).bytes, checkpoint_all_peak_bytes(graph) + 1, 3):
        problem = Problem(graph, costs, ram=ram)
        best = min((time for peak, time in every if peak <= ram), default=None)
        if best is None:
            with pytest.raises(MethodNotApplicableError, match="no persistent schedule"):
                rotor(problem)
            continue
        schedule = rotor(problem)
        assert verify(problem, schedule).valid
        assert simulate(graph, costs, schedule).compute_s == best


@pytest.mark.parametrize("seed", range(8))
def test_steps_of_several_nodes_keep_the_budget(seed: int) -> None:
    """Networks with skips are cut into steps; what comes out fits and costs more with less RAM."""
    graph = random_training_graph(seeded(f"rotor steps/{seed}"), 7)
    costs = chain_costs(graph)
    for share in (100, 85, 70):
        problem = Problem(graph, costs, ram=f"{share}%")
        try:
            schedule = rotor(problem)
        except MethodNotApplicableError:
            continue
        assert verify(problem, schedule).valid
        assert schedule.M_in == schedule.M_out == ()
