"""Optimal persistent checkpointing of chains whose steps differ in time and size: rotor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from poetmodel.baselines.chain import Chain, ChainMemory
from poetmodel.errors import MethodNotApplicableError
from poetmodel.schedule import simulate
from poetmodel.time_limit import check_time_limit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from poetmodel.problem import Problem
    from poetmodel.schedule import Schedule

UNITS: Final = 500
"""Units of memory into which a larger budget is divided (the paper's figure)."""
MARGIN: Final = 4
"""The program covers budgets larger by this fraction, as it may count too much."""


def rotor(problem: Problem) -> Schedule:
    """Recompute the steps of a chain with the least compute time, checkpoints staying to their use.

    Energy, deadline and storage are ignored.

    Returns
    -------
    Schedule
        Of the least forward time among persistent schedules of the chain, memory in units.

    Raises
    ------
    MethodNotApplicableError
        If the graph is no chain of steps, or no persistent schedule keeps the budget.

    Notes
    -----
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

    References
    ----------
    Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, Optimal checkpointing for heterogeneous
    chains: how to train deep neural networks with limited memory, 2019, arXiv:1911.13214,
    section 4.
    """
    chain = Chain.of(problem.graph)
    table = _Table.of(problem, chain)
    best: tuple[float, Schedule] | None = None
    low, high = 0, table.units
    units = table.budget
    while low <= high:
        schedule = table.schedule(units)
        simulation = None if schedule is None else simulate(problem.graph, problem.costs, schedule)
        if simulation is None or simulation.peak_ram_bytes <= problem.usable_ram_bytes:
            low = units + 1
        else:
            high = units - 1
        if schedule and simulation and low > units:
            compute_s = simulation.compute_s or 0.0
            best = min(best or (compute_s, schedule), (compute_s, schedule), key=lambda b: b[0])
        units = (low + high) // 2
    if best is None:
        msg = (
            f"no persistent schedule of its {len(chain.steps)} steps keeps within the "
            f"{problem.usable_ram_bytes:,} B that tensors may use"
        )
        raise MethodNotApplicableError(msg)
    return best[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decision:
    """A first decision for steps ``s..t``: tape step `s`, or store the state before step `cut`."""

    cut: int | None
    """None to tape step `s`."""
    time_s: float
    """Time of the forward steps up to the decision [s]."""
    held_units: int
    """What stays while the steps behind the decision are done."""
    least_units: int
    """What the forward steps, or the part of a taped step, need at least."""

    @property
    def begin(self) -> int:
        """The fewest units with which the decision is possible."""
        return max(self.held_units, self.least_units)


@dataclass(slots=True)
class _Table:
    """The dynamic program over steps ``0..L-1``."""

    chain: Chain
    memory: ChainMemory
    forward_s: list[float]
    """Time of each step [s]."""
    rest_s: list[float]
    """Time of what is missing of each step's tape when its state is in memory [s]."""
    unit_bytes: int
    budget: int
    """The budget, in units."""
    units: int
    """The largest memory of the tables."""
    least_s: dict[tuple[int, int, bool], NDArray[np.float64]]
    """For steps ``s..t`` the least time with 0, 1, ... units; infinite where they are too few.

    The third index says whether the state of step `t` is in memory, and counted, from the start.
    """
    before_s: dict[tuple[int, int], NDArray[np.float64]]
    """The same after part ``t + 1``, which has read the state of step `t`: freed, or left."""

    @classmethod
    def of(cls, problem: Problem, chain: Chain) -> _Table:
        usable = problem.usable_ram_bytes
        unit_bytes = max(1, -(-usable // UNITS))
        count = len(chain.steps)
        memory = ChainMemory(chain)
        times = problem.table.compute_time_s
        table = cls(
            chain=chain,
            memory=memory,
            forward_s=[sum(times[k] for k in memory.recomputed_nodes(s)) for s in range(count)],
            rest_s=[sum(times[k] for k in memory.nodes_beside_state(s)) for s in range(count)],
            unit_bytes=unit_bytes,
            budget=usable // unit_bytes,
            units=usable // unit_bytes + usable // unit_bytes // MARGIN,
            least_s={},
            before_s={},
        )
        for span in range(count):
            for s in range(count - span):
                table.fill(s, s + span)
        return table

    def fill(self, s: int, t: int) -> None:
        """Enter the least times of steps ``s..t``, all shorter spans being known."""
        check_time_limit()
        for kept in (False, True):
            best = np.full(self.units + 1, np.inf)
            self.least_s[s, t, kept] = best
            if kept and not self.kept_bytes(t):
                continue
            if s == t:
                best[self.alone_units(s, kept=kept) :] = self.alone_s(s, kept=kept)
                continue
            for decision in self.decisions(s, t, kept=kept):
                begin, held = decision.begin, decision.held_units
                if begin > self.units:
                    continue
                behind = self.least_s[s + 1 if decision.cut is None else decision.cut, t, kept]
                times = behind[begin - held : self.units + 1 - held] + decision.time_s
                if decision.cut is not None:
                    times += self.before_s[s, decision.cut - 1][begin:]
                np.minimum(best[begin:], times, out=best[begin:])
        if t + 1 < len(self.chain.steps):
            self.before_s[s, t] = np.minimum(self.least_s[s, t, False], self.staying(s, t))

    def staying(self, s: int, t: int) -> NDArray[np.float64]:
        """Return the least times of steps ``s..t`` where the state of `t` stays after part `t + 1`.

        That part must have room for it up to its end.
        """
        times = self.least_s[s, t, True].copy()
        times[: self.state_units(t) + self.up(self.memory.backward_bytes[t + 1])] = np.inf
        return times

    def decisions(self, s: int, t: int, *, kept: bool) -> Iterator[_Decision]:
        """Yield the first decisions for steps ``s..t``."""
        beside = self.kept_bytes(t) if kept else 0
        held, least = self.tape_units(s), self.taped_units(s, t, beside)
        if self.kept_bytes(s):  # the next part has it beside itself up to its end
            least = max(least, held + self.up(self.memory.backward_bytes[s + 1]))
        yield _Decision(cut=None, time_s=self.forward_s[s], held_units=held, least_units=least)
        run_s, peak = 0.0, 0
        for cut in range(s + 1, t + 1):
            run_s += self.forward_s[cut - 1]
            peak = max(peak, self.run_units(s, cut - 1, t, beside))
            held = self.state_units(cut - 1)
            yield _Decision(cut=cut, time_s=run_s, held_units=held, least_units=peak)

    def schedule(self, units: int) -> Schedule | None:
        """Return the best schedule with so much memory, None where it is too little."""
        steps = self.chain.steps
        if not np.isfinite(self.least_s[0, len(steps) - 1, False][units]):
            return None
        held: dict[int, frozenset[int]] = {}
        freed: set[int] = set()
        todo = [(0, len(steps) - 1, units, frozenset[int](), False)]
        while todo:
            check_time_limit()
            s, t, m, outside, kept = todo.pop()
            decision = None if s == t else self.best_decision(s, t, m, kept=kept)
            if decision is None or decision.cut is None:
                held[s] = outside | steps[s].tape
                if decision is not None:
                    tape = steps[s].tape | steps[s].state
                    todo.append((s + 1, t, m - decision.held_units, outside | tape, kept))
                continue
            stored = decision.cut - 1
            stays = bool(self.staying(s, stored)[m] <= self.least_s[s, stored, False][m])
            if not stays:
                freed.add(stored)
            state = steps[stored].state
            todo.append((decision.cut, t, m - decision.held_units, outside | state, kept))
            todo.append((s, stored, m, outside, stays))
        return self.chain.realize(held, freed=freed)

    def best_decision(self, s: int, t: int, m: int, *, kept: bool) -> _Decision | None:
        """Return the best first decision for steps ``s..t`` with `m` units."""
        best_s, best = np.inf, None
        for decision in self.decisions(s, t, kept=kept):
            if m < decision.begin:
                continue
            behind = self.least_s[s + 1 if decision.cut is None else decision.cut, t, kept]
            time_s = behind[m - decision.held_units] + decision.time_s
            if decision.cut is not None:
                time_s += self.before_s[s, decision.cut - 1][m]
            if time_s < best_s:
                best_s, best = time_s, decision
        return best

    # -- what steps take, in units ---------------------------------------------------------------

    def alone_s(self, s: int, *, kept: bool) -> float:
        """Return the time of step `s` by itself: none if its part reads nothing of it."""
        if kept:
            return self.rest_s[s]
        return self.forward_s[s] if self.must_run(s) else 0.0

    def alone_units(self, s: int, *, kept: bool) -> int:
        part = self.memory.freeing_bytes[s]
        if kept:
            return self.up(max(part, self.memory.beside_state_bytes(s)))
        return self.up(max(part, self.memory.peaks(s, s).taped) if self.must_run(s) else part)

    def must_run(self, s: int) -> bool:
        return bool(self.chain.steps[s].tape) or s == len(self.chain.steps) - 1

    def taped_units(self, s: int, t: int, beside: int) -> int:
        taped = self.memory.peaks(s, t).taped + beside
        return self.up(max(taped, self.memory.freeing_bytes[s]))

    def run_units(self, first: int, s: int, t: int, beside: int) -> int:
        peaks = self.memory.peaks(s, t)
        return self.up((peaks.run if s == first else peaks.run_with_input) + beside)

    def tape_units(self, s: int) -> int:
        return self.up(self.chain.bytes_of(self.chain.steps[s].tape | self.chain.steps[s].state))

    def state_units(self, s: int) -> int:
        return self.up(self.chain.bytes_of(self.chain.steps[s].state))

    def kept_bytes(self, s: int) -> int:
        """Return the bytes of the state of step `s` that its part reads [B]."""
        return self.chain.bytes_of(self.chain.steps[s].state & self.chain.steps[s].tape)

    def up(self, size_bytes: int) -> int:
        return -(-size_bytes // self.unit_bytes)
