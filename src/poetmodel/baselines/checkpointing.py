"""Checkpoints along a chain: revolve, of Griewank and Walther, and rotor.

Revolve is binomial and counts all steps alike; rotor is optimal among persistent checkpoints where
they differ in time and size.
"""

from __future__ import annotations

import math
from math import comb
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from poetmodel.baselines.chain import Chain, ChainMemory
from poetmodel.baselines.engine import bisected
from poetmodel.baselines.homes import all_in_ram, forward_only
from poetmodel.clock import check_time_limit
from poetmodel.errors import MethodNotApplicableError
from poetmodel.schedule import Schedule, simulate

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from poetmodel.problem import Problem


@all_in_ram
@forward_only
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
    """Return the state before step `s` that part `s` reads; revolve has it without a slot."""
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


# -- rotor -----------------------------------------------------------------------------------------


UNITS: Final = 500
"""Units of memory into which a larger budget is divided (the paper's figure)."""
MARGIN: Final = 4
"""The program covers budgets larger by this fraction, as it may count too much."""


@all_in_ram
@forward_only
def rotor(problem: Problem) -> Schedule:
    """Recompute the steps of a chain with the least compute time, checkpoints staying to their use.

    Energy, deadline and storage are ignored.

    The dynamic program of the paper: ``C(s, t, m)`` is the least time to go through steps ``s..t``
    and their parts of the backward pass with memory `m` beside the state before `s`. Either step
    `s` is computed and taped once (``F_all``), then ``s+1..t`` follow; or steps run without a tape
    up to a state that is stored (``F_ck``), the steps behind it are done, and then those before.
    The paper frees the stored state after the step behind it and recomputes it for its own step.
    Where the part of that step reads the state, a second table says what is gained by leaving it in
    memory, and the better of both is taken. What a step, a tape or a part of the backward pass
    takes at its peak is counted here from the graph's own nodes, with inputs, outputs and workspace
    together, gradients and samples included. Sizes are rounded up to units of a 500th of the budget
    (budgets of at most 500 bytes are exact), and a state counts until the next step's part is over.
    So the simulator may count less than the program did. A bisection finds the largest memory, up
    to a fourth above the budget, whose schedule keeps the budget in the simulator. The best
    schedule seen is returned. It takes time in proportion to ``L**3 * 500`` for `L` steps.
    """
    return checkpointed(problem, ChainTable(problem))


def checkpointed(problem: Problem, table: ChainTable) -> Schedule:
    """Return the schedule of `rotor` by its table."""
    best = bisected(problem, table.schedule, table.budget, table.units)
    if best is None:
        raise MethodNotApplicableError(
            f"no persistent schedule of its {len(table.chain.steps)} steps keeps within the "
            f"{problem.usable_ram_bytes:,} B that tensors may use"
        )
    return best


class _Decision(NamedTuple):
    """A first decision for steps ``s..t``: tape step `s`, or store the state before step `cut`."""

    cut: int | None
    """None to tape step `s`."""
    time_s: float
    """Time of the forward steps up to the decision [s]."""
    held_units: int
    """What stays while the steps behind the decision are done."""
    begin: int
    """The fewest units with which the decision is possible."""


class ChainTable:
    """The dynamic program over steps ``0..L-1``."""

    def __init__(self, problem: Problem, times: Sequence[float] = ()) -> None:
        self.chain = chain = ChainMemory(problem.graph)
        times = times or problem.table.compute_time_s
        steps = range(len(chain.steps))
        self.forward_s = [sum(times[k] for k in chain.recomputed_nodes(s)) for s in steps]
        self.rest_s = [sum(times[k] for k in chain.nodes_beside_state(s)) for s in steps]
        """Time of what is missing of each step's tape when its state is in memory [s]."""
        self.unit_bytes = max(1, -(-problem.usable_ram_bytes // UNITS))
        self.budget = problem.usable_ram_bytes // self.unit_bytes
        """The budget, in units."""
        self.units = self.budget + self.budget // MARGIN
        """The largest memory of the tables."""
        self.least_s: dict[tuple[int, int, bool], NDArray[np.float64]] = {}
        """For steps ``s..t`` the least time with 0, 1, ... units; infinite where they are too few.

        The third index says whether the state of step `t` is in memory, and counted, from the
        start.
        """
        self.before_s: dict[tuple[int, int], NDArray[np.float64]] = {}
        """The same after part ``t + 1``, which has read the state of step `t`: freed, or left."""
        for span in steps:
            for s in range(len(steps) - span):
                self.fill(s, s + span)

    def fill(self, s: int, t: int) -> None:
        """Enter the least times of steps ``s..t``, all shorter spans being known."""
        check_time_limit()
        for kept in (False, True):
            best = np.full(self.units + 1, np.inf)
            self.least_s[s, t, kept] = best
            if kept and not self.kept_bytes(t):
                continue
            if s == t:
                least, time_s = self.alone(s, kept=kept)
                best[least:] = time_s
                continue
            for decision in self.decisions(s, t, kept=kept):
                if decision.begin <= self.units:
                    times = self.times_s(decision, s, t, decision.begin, self.units, kept=kept)
                    np.minimum(best[decision.begin :], times, out=best[decision.begin :])
        if t + 1 < len(self.chain.steps):
            self.before_s[s, t] = np.minimum(self.least_s[s, t, False], self.staying(s, t))

    def times_s(
        self, decision: _Decision, s: int, t: int, least: int, most: int, *, kept: bool
    ) -> NDArray[np.float64]:
        """Return the times of steps ``s..t`` after a decision, with `least` to `most` units."""
        held, cut = decision.held_units, decision.cut
        behind = self.least_s[s + 1 if cut is None else cut, t, kept]
        times = behind[least - held : most + 1 - held] + decision.time_s
        return times if cut is None else times + self.before_s[s, cut - 1][least : most + 1]

    def staying(self, s: int, t: int) -> NDArray[np.float64]:
        """Return the least times of steps ``s..t`` where the state of `t` stays after part `t + 1`.

        That part must have room for it up to its end.
        """
        times = self.least_s[s, t, True].copy()
        times[: self.state_units(t) + self.up(self.chain.backward_bytes[t + 1])] = np.inf
        return times

    def decisions(self, s: int, t: int, *, kept: bool) -> Iterator[_Decision]:
        """Yield the first decisions for steps ``s..t``."""
        beside = self.kept_bytes(t) if kept else 0
        chain, step = self.chain, self.chain.steps[s]
        held = self.up(chain.bytes_of(step.tape | step.state))
        least = self.up(max(chain.peaks(s, t).taped + beside, chain.freeing_bytes[s]))
        if self.kept_bytes(s):  # the next part has it beside itself up to its end
            least = max(least, held + self.up(chain.backward_bytes[s + 1]))
        yield _Decision(None, self.forward_s[s], held, max(held, least))
        run_s, peak = 0.0, 0
        for cut in range(s + 1, t + 1):
            run_s += self.forward_s[cut - 1]
            peaks = chain.peaks(cut - 1, t)
            run_bytes = peaks.run if cut == s + 1 else peaks.run_with_input
            peak = max(peak, self.up(run_bytes + beside))
            held = self.state_units(cut - 1)
            yield _Decision(cut, run_s, held, max(held, peak))

    def schedule(self, units: int) -> Schedule | None:
        """Return the best schedule with so much memory, None where it is too little."""
        last = len(self.chain.steps) - 1
        if not np.isfinite(self.least_s[0, last, False][units]):
            return None
        held, freed = self.decided(0, last, units, frozenset(), kept=False)
        return self.chain.realize(held, freed=freed)

    def decided(
        self, first: int, last: int, units: int, outside: frozenset[int], *, kept: bool
    ) -> tuple[dict[int, frozenset[int]], set[int]]:
        """Return the first contents of parts of steps `first` to `last`, and the states freed.

        `outside` is held beside the steps; the state of the last step is there too if it is `kept`.
        """
        steps = self.chain.steps
        held: dict[int, frozenset[int]] = {}
        freed: set[int] = set()
        todo = [(first, last, units, outside, kept)]
        while todo:
            check_time_limit()
            s, t, m, beside, stays = todo.pop()
            decision = None if s == t else self.best_decision(s, t, m, kept=stays)
            if decision is None or decision.cut is None:
                held[s] = beside | steps[s].tape
                if decision is not None:
                    tape = steps[s].tape | steps[s].state
                    todo.append((s + 1, t, m - decision.held_units, beside | tape, stays))
                continue
            stored = decision.cut - 1
            again = bool(self.staying(s, stored)[m] > self.least_s[s, stored, False][m])
            if again:
                freed.add(stored)
            state = steps[stored].state
            todo.append((decision.cut, t, m - decision.held_units, beside | state, stays))
            todo.append((s, stored, m, beside, not again))
        return held, freed

    def run_cost(self, first: int, last: int, room_bytes: int) -> float:
        """Return the least time to recompute steps for their parts, the one behind them over [s].

        It is infinite where the room is too little.
        """
        units = min(room_bytes // self.unit_bytes, self.units)
        return math.inf if units < 0 else min(self._freed_or_kept(first, last, units))

    def run(
        self, first: int, last: int, room_bytes: int, outside: frozenset[int]
    ) -> tuple[dict[int, frozenset[int]], set[int]]:
        """Return the first contents of the parts of such a run, and the states that are freed."""
        units = min(room_bytes // self.unit_bytes, self.units)
        freed_s, kept_s = self._freed_or_kept(first, last, units)
        held, freed = self.decided(first, last, units, outside, kept=bool(kept_s <= freed_s))
        return held, freed | ({last} if kept_s > freed_s else set())

    def _freed_or_kept(self, first: int, last: int, units: int) -> tuple[float, float]:
        """Return the least times where the state of the last step is freed, and where it stays."""
        freed, kept = (self.least_s[first, last, kept] for kept in (False, True))
        return float(freed[units]), float(kept[units])

    def best_decision(self, s: int, t: int, m: int, *, kept: bool) -> _Decision:
        """Return the best first decision for steps ``s..t`` with `m` units."""
        possible = (x for x in self.decisions(s, t, kept=kept) if x.begin <= m)
        return min(possible, key=lambda x: self.times_s(x, s, t, m, m, kept=kept)[0])

    # -- what steps take, in units ---------------------------------------------------------------

    def alone(self, s: int, *, kept: bool) -> tuple[int, float]:
        """Return memory and time of step `s` by itself: no time if its part reads nothing of it."""
        part = self.chain.freeing_bytes[s]
        if kept:
            return self.up(max(part, self.chain.beside_state_bytes(s))), self.rest_s[s]
        if self.chain.steps[s].tape or s == len(self.chain.steps) - 1:
            return self.up(max(part, self.chain.peaks(s, s).taped)), self.forward_s[s]
        return self.up(part), 0.0

    def state_units(self, s: int) -> int:
        """Return the size of the state of step `s`."""
        return self.up(self.chain.bytes_of(self.chain.steps[s].state))

    def kept_bytes(self, s: int) -> int:
        """Return the bytes of the state of step `s` that its part reads [B]."""
        return self.chain.bytes_of(self.chain.steps[s].state & self.chain.steps[s].tape)

    def up(self, size_bytes: int) -> int:
        """Return the number of units that so many bytes need."""
        return -(-size_bytes // self.unit_bytes)
