"""Binomial checkpointing: revolve, of Griewank and Walther."""

from __future__ import annotations

from math import comb
from typing import TYPE_CHECKING

from poetmodel.baselines.chain import Chain
from poetmodel.baselines.homes import all_in_ram
from poetmodel.errors import MethodNotApplicableError
from poetmodel.schedule import simulate
from poetmodel.time_limit import check_time_limit

if TYPE_CHECKING:
    from poetmodel.problem import Problem
    from poetmodel.schedule import Schedule


@all_in_ram
def griewank_walther(problem: Problem) -> Schedule:
    """Checkpoint by the binomial rule with as many slots as the budget allows.

    The largest number of slots whose schedule keeps the RAM budget is found by bisection.

    Steps are those of `poetmodel.baselines.chain`: on a plain chain its nodes, else what lies
    between articulation points. A slot holds all outputs of a step's last node that are still read;
    the sample is the first slot. All steps count the same, whatever they cost. Reversing a step
    computes it once more if its part of the backward pass reads its outputs. That is not counted
    in `forward_steps`, as revolve does not count the step that is taped. Where the state behind a
    step is in RAM already, as the next step's part has read it, it stays. Where that takes too much
    RAM, it is freed and recomputed, as revolve does. The bisection takes time
    in proportion to the square of the number of nodes, times the logarithm of that of the steps.
    """
    chain = Chain(problem.graph)
    best: Schedule | None = None
    low, high, peak = 1, len(chain.steps), 0
    while low <= high:
        slots = high if best is None and high == len(chain.steps) else (low + high) // 2
        for freed in (False, True):
            schedule = revolve(chain, slots, freed=freed)
            peak = simulate(problem.graph, None, schedule).peak_ram_bytes
            if peak <= problem.usable_ram_bytes:
                best, low = schedule, slots + 1
                break
        else:
            high = slots - 1
    if best is None:
        raise MethodNotApplicableError(
            f"with one slot it needs {peak:,} B, more than the {problem.usable_ram_bytes:,} B that "
            "tensors may use"
        )
    return best


def revolve(chain: Chain, slots: int, *, freed: bool = False) -> Schedule:
    """Return the schedule of revolve with a number of slots, one or more, the sample's included.

    With `freed` a state is freed before the part of its own step, which recomputes it.
    """
    held: dict[int, frozenset[int]] = {}
    todo = [(0, len(chain.steps), slots, frozenset[int]())]
    while todo:
        check_time_limit()
        low, high, free, stored = todo.pop()
        if high - low == 1 or free == 1:
            for s in range(low, high):
                held[s] = stored | chain.steps[s].tape | _read_state(chain, s)
            continue
        middle = low + _advance(high - low, free)
        todo.append((low, middle, free, stored))
        todo.append((middle, high, free - 1, stored | chain.steps[middle - 1].outputs))
    return chain.realize(held, freed=range(len(chain.steps)) if freed else ())


def _read_state(chain: Chain, s: int) -> frozenset[int]:
    """Return what part `s` reads of the state before its step; revolve has it without a slot."""
    if s == 0:
        return frozenset()
    read = {i for t in chain.steps[s].backward for i in chain.graph.inputs_of[t]}
    return chain.steps[s - 1].state & read


def forward_steps(length: int, slots: int) -> int:
    """Return the least number of forward steps that reversing a chain of some `length` takes.

    It is ``r * length - C(slots + r, slots + 1)`` for the least `r` with
    ``C(slots + r, slots) >= length`` (Griewank and Walther, 2000, equations 1 and 2). Slots include
    that of the first state; taped steps are not counted.

    Examples
    --------
    >>> forward_steps(10, 3), forward_steps(4, 1)
    (15, 6)
    """
    repeats = 0
    while comb(slots + repeats, slots) < length:
        repeats += 1
    return repeats * length - comb(slots + repeats, slots + 1)


def _advance(length: int, slots: int) -> int:
    """Return after how many steps the next state is stored (the least of the best)."""
    return min(
        range(1, length),
        key=lambda step: (
            step + forward_steps(length - step, slots - 1) + forward_steps(step, slots),
            step,
        ),
    )
