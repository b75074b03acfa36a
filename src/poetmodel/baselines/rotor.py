"""Optimal persistent checkpointing of chains whose steps differ in time and size: rotor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from poetmodel.baselines.chain import Chain
from poetmodel.baselines.chain_memory import ChainMemory
from poetmodel.errors import MethodNotApplicableError
from poetmodel.schedule import simulate

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from poetmodel.problem import Problem
    from poetmodel.schedule import Schedule

UNITS: Final = 500
"""Into how many units of memory a larger budget is divided (the paper's figure)."""
MARGIN: Final = 4
"""The program looks at budgets that are larger by a fourth, in case it counted too much."""


def rotor(problem: Problem) -> Schedule:
    """Recompute the steps of a chain with the least compute time, checkpoints staying to their use.

    Parameters
    ----------
    problem : Problem
        What to schedule; energy, deadline and storage play no part.

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
    What a step, a tape or a part of the backward pass takes at its peak is counted here from the
    graph's own nodes, with inputs, outputs and workspace together, gradients and samples included.
    Sizes are rounded up to units of a 500th of the budget (budgets of at most 500 bytes are exact),
    and a state counts until the next step's part is over. So the judge may find less in use than
    the program did: it looks, by bisection, for the largest memory up to a fourth above the budget
    with which the judge finds the budget kept, and the best schedule seen is returned. It takes
    time in proportion to ``L**3 * 500`` for `L` steps.

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
        walk = None if schedule is None else simulate(problem.graph, problem.costs, schedule)
        if walk is None or walk.peak_ram_bytes <= problem.usable_ram_bytes:
            low = units + 1
        else:
            high = units - 1
        if schedule and walk and low > units:
            compute_s = walk.compute_s or 0.0
            best = min(best or (compute_s, schedule), (compute_s, schedule), key=lambda b: b[0])
        units = (low + high) // 2
    if best is None:
        msg = (
            f"no persistent schedule of its {len(chain.steps)} steps keeps within the "
            f"{problem.usable_ram_bytes:,} B that tensors may use"
        )
        raise MethodNotApplicableError(msg)
    return best[1]


@dataclass(slots=True)
class _Table:
    """The dynamic program over steps ``0..L-1``."""

    chain: Chain
    memory: ChainMemory
    forward_s: list[float]
    """Time of each step [s]."""
    unit_bytes: int
    budget: int
    """The budget, in units."""
    units: int
    """The largest memory that is looked at."""
    least_s: list[list[NDArray[np.float64]]]
    """For steps ``s..t`` the least time with 0, 1, ... units; infinite where they are too few."""

    @classmethod
    def of(cls, problem: Problem, chain: Chain) -> _Table:
        usable = problem.usable_ram_bytes
        unit_bytes = max(1, -(-usable // UNITS))
        count = len(chain.steps)
        memory = ChainMemory.of(chain)
        times = problem.table.compute_time_s
        table = cls(
            chain=chain,
            memory=memory,
            forward_s=[sum(times[k] for k in memory.made_again(s)) for s in range(count)],
            unit_bytes=unit_bytes,
            budget=usable // unit_bytes,
            units=usable // unit_bytes + usable // unit_bytes // MARGIN,
            least_s=[[np.empty(0)] * count for _ in range(count)],
        )
        for span in range(count):
            for s in range(count - span):
                table.fill(s, s + span)
        return table

    def fill(self, s: int, t: int) -> None:
        """Enter the least times of steps ``s..t``, all shorter spans being known."""
        best = np.full(self.units + 1, np.inf)
        if s == t:
            self.lower(best, 0, np.full(self.units + 1, self.alone_s(s)), self.alone_units(s))
        else:
            taped = self.least_s[s + 1][t] + self.forward_s[s]
            self.lower(best, self.tape_units(s), taped, self.taped_units(s, t))
            run_s, peak = 0.0, 0
            for cut in range(s + 1, t + 1):
                run_s += self.forward_s[cut - 1]
                peak = max(peak, self.run_units(s, cut - 1, t))
                rest = self.least_s[cut][t]
                stored = self.state_units(cut - 1)
                begin = max(stored, peak)
                if begin <= self.units:
                    both = rest[begin - stored : self.units + 1 - stored] + run_s
                    both += self.least_s[s][cut - 1][begin:]
                    np.minimum(best[begin:], both, out=best[begin:])
        self.least_s[s][t] = best

    def lower(
        self, best: NDArray[np.float64], held: int, values: NDArray[np.float64], peak: int
    ) -> None:
        """Lower `best` to what is possible with `held` units less, from `peak` units on."""
        begin = max(held, peak)
        if begin <= self.units:
            np.minimum(best[begin:], values[begin - held : self.units + 1 - held], out=best[begin:])

    def schedule(self, units: int) -> Schedule | None:
        """Return the best schedule with so much memory, None where it is too little."""
        steps = self.chain.steps
        if not np.isfinite(self.least_s[0][len(steps) - 1][units]):
            return None
        held: dict[int, frozenset[int]] = {}
        todo = [(0, len(steps) - 1, units, frozenset[int]())]
        while todo:
            s, t, m, outside = todo.pop()
            cut = None if s == t else self.choice(s, t, m)
            if cut is None:
                held[s] = outside | steps[s].tape
                if s < t:
                    tape = steps[s].tape | steps[s].state
                    todo.append((s + 1, t, m - self.tape_units(s), outside | tape))
            else:
                state = steps[cut - 1].state
                todo.append((cut, t, m - self.state_units(cut - 1), outside | state))
                todo.append((s, cut - 1, m, outside))
        return self.chain.realize(held)

    def choice(self, s: int, t: int, m: int) -> int | None:
        """Return the step before which a state is stored, or None to tape step `s`."""
        best_s = np.inf
        best: int | None = None
        left = m - self.tape_units(s)
        if left >= 0 and m >= self.taped_units(s, t):
            best_s = self.least_s[s + 1][t][left] + self.forward_s[s]
        run_s, peak = 0.0, 0
        for cut in range(s + 1, t + 1):
            run_s += self.forward_s[cut - 1]
            peak = max(peak, self.run_units(s, cut - 1, t))
            left = m - self.state_units(cut - 1)
            if left < 0 or m < peak:
                continue
            value = run_s + self.least_s[cut][t][left] + self.least_s[s][cut - 1][m]
            if value < best_s:
                best_s, best = value, cut
        return best

    # -- what steps take, in units ---------------------------------------------------------------

    def alone_s(self, s: int) -> float:
        """Return the time of step `s` by itself: none if its part reads nothing of it."""
        return self.forward_s[s] if self.must_run(s) else 0.0

    def alone_units(self, s: int) -> int:
        part = self.memory.backward_bytes[s]
        return self.up(max(part, self.memory.taped_bytes(s, s)) if self.must_run(s) else part)

    def must_run(self, s: int) -> bool:
        return bool(self.chain.steps[s].tape) or s == len(self.chain.steps) - 1

    def taped_units(self, s: int, t: int) -> int:
        return self.up(max(self.memory.taped_bytes(s, t), self.memory.backward_bytes[s]))

    def run_units(self, first: int, s: int, t: int) -> int:
        return self.up(self.memory.run_bytes(s, t, from_outside=s == first))

    def tape_units(self, s: int) -> int:
        return self.up(self.chain.bytes_of(self.chain.steps[s].tape | self.chain.steps[s].state))

    def state_units(self, s: int) -> int:
        return self.up(self.chain.bytes_of(self.chain.steps[s].state))

    def up(self, size_bytes: int) -> int:
        return -(-size_bytes // self.unit_bytes)
