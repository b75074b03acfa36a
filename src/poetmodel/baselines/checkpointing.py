"""Checkpointing of chains: revolve (Griewank and Walther) and rotor (Beaumont et al.).

Revolve is binomial and assumes equal steps. Rotor is optimal among persistent checkpoints for steps
of different time and size.
"""

from __future__ import annotations

import math
from math import comb
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from poetmodel.baselines.chain import Chain, ChainMemory
from poetmodel.baselines.engine import bisect_budget
from poetmodel.baselines.homes import use_homes_of
from poetmodel.clock import check_time_limit
from poetmodel.errors import MethodNotApplicableError
from poetmodel.schedule import Schedule, simulate

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from poetmodel.problem import Problem


@use_homes_of("griewank-walther")
def griewank_walther(problem: Problem) -> Schedule:
    """Checkpoint by the binomial rule with as many slots as the budget allows, by bisection.

    Steps are those of `poetmodel.baselines.chain`: nodes on a plain chain, otherwise the nodes
    between articulation points. All have equal cost. A slot stores all outputs of a step's last
    node that are read later; the sample uses the first slot. All state of the
    graph, such as parameters, is in RAM. Reversing a step computes it once more if its part of the
    backward pass reads its outputs; `min_forward_steps` does not count this, as revolve does not
    count the taped step. Outputs that a step passes to the next one stay in RAM if the next one's
    part of the backward pass has read them, unless the schedule then exceeds the budget.

    Raises `MethodNotApplicableError` if the schedule with one slot exceeds the budget.
    """
    chain = Chain(problem.graph)
    best_schedule: Schedule | None = None
    low, high, peak = 1, len(chain.steps), 0
    while low <= high:
        slots = high if best_schedule is None and high == len(chain.steps) else (low + high) // 2
        for frees_states in (False, True):
            schedule = revolve(chain, slots, frees_states=frees_states)
            peak = simulate(problem.graph, None, schedule).peak_ram_bytes
            if peak <= problem.usable_ram_bytes:
                best_schedule, low = schedule, slots + 1
                break
        else:
            high = slots - 1
    if best_schedule is None:
        raise MethodNotApplicableError(
            f"with one slot it needs {peak:,} B, more than the {problem.usable_ram_bytes:,} B that "
            "tensors may use"
        )
    return best_schedule


def revolve(chain: Chain, slots: int, *, frees_states: bool = False) -> Schedule:
    """Return the schedule of revolve with `slots` slots, of which the sample uses the first.

    `slots` must be at least 1. With `frees_states`, the state of each step is freed before its part
    of the backward pass and recomputed for it; otherwise it stays if the next part has read it.
    """
    tensors_of_part: dict[int, frozenset[int]] = {}
    pending_spans = [(0, len(chain.steps), slots, frozenset[int]())]
    while pending_spans:
        check_time_limit()
        low, high, free_slots, stored_tensors = pending_spans.pop()
        if high - low == 1 or free_slots == 1:
            for s in range(low, high):
                tensors_of_part[s] = (
                    stored_tensors | chain.steps[s].tape | _state_read_by_part(chain, s)
                )
            continue
        middle = low + _steps_to_next_checkpoint(high - low, free_slots)
        pending_spans.append((low, middle, free_slots, stored_tensors))
        pending_spans.append(
            (middle, high, free_slots - 1, stored_tensors | chain.steps[middle - 1].outputs)
        )
    return chain.to_schedule(
        tensors_of_part, freed_steps=range(len(chain.steps)) if frees_states else ()
    )


def _state_read_by_part(chain: Chain, s: int) -> frozenset[int]:
    """Return the tensors of the state before step `s` that part `s` reads; empty for step 0."""
    if s == 0:
        return frozenset()
    tensors_read = {i for t in chain.steps[s].backward for i in chain.graph.inputs_of[t]}
    return chain.steps[s - 1].state & tensors_read


def min_forward_steps(length: int, slots: int) -> int:
    """Return the minimum number of forward steps that reverse a chain of `length` steps.

    It is ``r * length - C(slots + r, slots + 1)`` for the smallest `r` with ``C(slots + r, slots)
    >= length`` (Griewank and Walther, 2000, equations 1 and 2). The slots, at least one, include
    that of the first state; taped steps are not counted.

    Examples
    --------
    >>> min_forward_steps(10, 3), min_forward_steps(4, 1)
    (15, 6)
    """
    repeats = 0
    while comb(slots + repeats, slots) < length:
        repeats += 1
    return repeats * length - comb(slots + repeats, slots + 1)


def _steps_to_next_checkpoint(length: int, slots: int) -> int:
    """Return the optimal number of steps up to the next checkpoint, the smallest in ties.

    `length` and `slots` must be at least 2; slots include that of the first state.
    """
    return min(
        range(1, length),
        key=lambda step: (
            step + min_forward_steps(length - step, slots - 1) + min_forward_steps(step, slots),
            step,
        ),
    )


# -- rotor -----------------------------------------------------------------------------------------


UNITS: Final = 500
"""Maximum number of memory units in a budget, as in the paper."""
MARGIN_DIVISOR: Final = 4
"""The dynamic program covers memories up to ``1 / MARGIN_DIVISOR`` above the budget, because it may
count more RAM than the simulator."""


@use_homes_of("rotor")
def rotor(problem: Problem) -> Schedule:
    """Recompute steps of a chain with minimum compute time; each checkpoint stays until its use.

    State tensors of the graph are in RAM. The dynamic program ignores energy, deadline and storage.

    The program is that of Beaumont et al.: ``C(s, t, m)`` is the minimum time to execute steps
    ``s..t`` and their parts of the backward pass with memory `m` beside the state before `s`. With
    ``F_all``, step `s` is computed and taped once; steps ``s+1..t`` follow. With ``F_ck``, steps
    are computed without a tape up to a state that is stored; the steps after the state follow, then
    those before it. The paper frees the stored state after the step that reads it and recomputes it
    for its own step. If the part of that step reads the state, a second table has the times with
    the state left in memory, and the better option is taken.

    Peaks are computed from the nodes of the graph. Sizes are rounded up to a 500th of the budget,
    and a state counts until the end of the next step's part, so the simulator may count less.
    Bisection finds the largest memory, up to a fourth above the budget, whose schedule meets the
    budget; the best schedule seen is returned. The run time is proportional to ``L**3 * 500``.
    """
    return best_rotor_schedule(problem, ChainTable(problem))


def best_rotor_schedule(problem: Problem, table: ChainTable) -> Schedule:
    """Bisect for the largest memory with which `table.build_schedule` meets the budget.

    Returns the best schedule by the problem's objective that meets the budget in the simulator; in
    ties, the first one.
    """
    best = bisect_budget(problem, table.build_schedule, table.budget_units, table.max_units)
    if best is None:
        raise MethodNotApplicableError(
            f"no persistent schedule of its {len(table.chain.steps)} steps fits in the "
            f"{problem.usable_ram_bytes:,} B that tensors may use"
        )
    return best


class _Decision(NamedTuple):
    """First decision for steps ``s..t``: tape step `s`, or store a checkpoint."""

    checkpoint_step: int | None
    """Step before which the state is stored as a checkpoint; None to tape step `s`."""
    time_s: float
    """Time of computing step `s`, or of the forward steps up to the checkpoint [s]."""
    held_units: int
    """Units that tape and state of step `s`, or the checkpoint, occupy during the later steps."""
    min_units: int
    """Minimum units for which the decision is possible."""


class ChainTable:
    """Dynamic program of `rotor` over steps ``0..L-1``: minimum times by memory.

    `times` replaces the compute times of the nodes [s]. They may be energies [J], which all methods
    then return in place of times.
    """

    def __init__(self, problem: Problem, times: Sequence[float] = ()) -> None:
        self.chain = chain = ChainMemory(problem.graph)
        times = times or problem.table.compute_time_s
        steps = range(len(chain.steps))
        self.forward_s = [sum(times[k] for k in chain.recomputed_nodes(s)) for s in steps]
        """Time to recompute each step [s]."""
        self.tape_completion_s = [
            sum(times[k] for k in chain.tape_completion_nodes(s)) for s in steps
        ]
        """Time to complete each step's tape if its state is in memory [s]."""
        self.unit_bytes = max(1, -(-problem.usable_ram_bytes // UNITS))
        """Bytes of a memory unit [B]."""
        self.budget_units = problem.usable_ram_bytes // self.unit_bytes
        """Budget [units]."""
        self.max_units = self.budget_units + self.budget_units // MARGIN_DIVISOR
        """Largest memory of the tables [units]."""
        self.min_time_s: dict[tuple[int, int, bool], NDArray[np.float64]] = {}
        """For steps ``s..t`` the minimum time with 0, 1, ... units [s]; inf if the units do not
        suffice. The third index is whether the state of step `t` is in memory, and counted, from
        the start; all times are then inf if part `t` does not read the state."""
        self.min_time_after_part_s: dict[tuple[int, int], NDArray[np.float64]] = {}
        """Minimum times of steps ``s..t`` after part ``t + 1``, which has read the state of step
        `t`: the smaller one of freeing and of keeping the state [s]."""
        for span in steps:
            for s in range(len(steps) - span):
                self.fill_span(s, s + span)

    def fill_span(self, s: int, t: int) -> None:
        """Set `min_time_s` and `min_time_after_part_s` of steps ``s..t`` from shorter spans."""
        check_time_limit()
        for keeps_state in (False, True):
            min_times = np.full(self.max_units + 1, np.inf)
            self.min_time_s[s, t, keeps_state] = min_times
            if keeps_state and not self.part_state_bytes(t):
                continue
            if s == t:
                min_units, step_time_s = self.single_step_memory_and_time(
                    s, keeps_state=keeps_state
                )
                min_times[min_units:] = step_time_s
                continue
            for decision in self.decisions(s, t, keeps_state=keeps_state):
                if decision.min_units <= self.max_units:
                    decision_times = self.times_after_decision(
                        decision, s, t, decision.min_units, self.max_units, keeps_state=keeps_state
                    )
                    np.minimum(
                        min_times[decision.min_units :],
                        decision_times,
                        out=min_times[decision.min_units :],
                    )
        if t + 1 < len(self.chain.steps):
            self.min_time_after_part_s[s, t] = np.minimum(
                self.min_time_s[s, t, False], self.min_times_with_state(s, t)
            )

    def times_after_decision(
        self,
        decision: _Decision,
        s: int,
        t: int,
        min_units: int,
        max_units: int,
        *,
        keeps_state: bool,
    ) -> NDArray[np.float64]:
        """Return the minimum times of steps ``s..t`` with a given first decision [s].

        One for each memory from `min_units` (at least the decision's) to `max_units`. With
        `keeps_state`, the state of step `t` is in memory, and counted.
        """
        held_units, checkpoint_step = decision.held_units, decision.checkpoint_step
        later_times = self.min_time_s[
            s + 1 if checkpoint_step is None else checkpoint_step, t, keeps_state
        ]
        times = later_times[min_units - held_units : max_units + 1 - held_units] + decision.time_s
        return (
            times
            if checkpoint_step is None
            else times
            + self.min_time_after_part_s[s, checkpoint_step - 1][min_units : max_units + 1]
        )

    def min_times_with_state(self, s: int, t: int) -> NDArray[np.float64]:
        """Return minimum times of steps ``s..t`` if the state of `t` stays after part `t + 1` [s].

        A copy, by units of memory, which include the state; inf if it does not fit.
        """
        times = self.min_time_s[s, t, True].copy()
        times[: self.state_units(t) + self.to_units(self.chain.backward_bytes[t + 1])] = np.inf
        return times

    def decisions(self, s: int, t: int, *, keeps_state: bool) -> Iterator[_Decision]:
        """Yield the possible first decisions for two or more steps ``s..t``.

        The first one tapes step `s`; further ones store a checkpoint before step ``s + 1``, ...,
        `t`. Decisions above `max_units` are included. With `keeps_state`, the state of `t` counts.
        """
        kept_state_bytes = self.part_state_bytes(t) if keeps_state else 0
        chain, step = self.chain, self.chain.steps[s]
        held_units = self.to_units(chain.total_bytes(step.tape | step.state))
        taped_units = self.to_units(
            max(chain.peaks(s, t).taped_bytes + kept_state_bytes, chain.freeing_bytes[s])
        )
        if self.part_state_bytes(s):  # the next part holds the state until its end
            taped_units = max(taped_units, held_units + self.to_units(chain.backward_bytes[s + 1]))
        yield _Decision(None, self.forward_s[s], held_units, max(held_units, taped_units))
        untaped_s, peak_units = 0.0, 0
        for checkpoint_step in range(s + 1, t + 1):
            untaped_s += self.forward_s[checkpoint_step - 1]
            peaks = chain.peaks(checkpoint_step - 1, t)
            untaped_bytes = (
                peaks.untaped_bytes if checkpoint_step == s + 1 else peaks.untaped_with_input_bytes
            )
            peak_units = max(peak_units, self.to_units(untaped_bytes + kept_state_bytes))
            held_units = self.state_units(checkpoint_step - 1)
            yield _Decision(checkpoint_step, untaped_s, held_units, max(held_units, peak_units))

    def build_schedule(self, units: int) -> Schedule | None:
        """Return the fastest schedule with `units` of memory, or None if they do not suffice."""
        last = len(self.chain.steps) - 1
        if not np.isfinite(self.min_time_s[0, last, False][units]):
            return None
        tensors_of_part, freed_steps = self.follow_decisions(
            0, last, units, frozenset(), keeps_last_state=False
        )
        return self.chain.to_schedule(tensors_of_part, freed_steps=freed_steps)

    def follow_decisions(
        self,
        first: int,
        last: int,
        units: int,
        outer_tensors: frozenset[int],
        *,
        keeps_last_state: bool,
    ) -> tuple[dict[int, frozenset[int]], set[int]]:
        """Return the tensors in RAM when each part begins, and the steps whose state is freed.

        Parts are by step from `first` to `last`; `outer_tensors` are in RAM during all of them.
        `units` must suffice. A checkpoint is freed before its step's part unless the part reads it,
        and keeping it fits and is not slower.
        """
        steps = self.chain.steps
        tensors_of_part: dict[int, frozenset[int]] = {}
        freed_steps: set[int] = set()
        pending_spans = [(first, last, units, outer_tensors, keeps_last_state)]
        while pending_spans:
            check_time_limit()
            s, t, free_units, held_tensors, keeps_state = pending_spans.pop()
            decision = (
                None if s == t else self.best_decision(s, t, free_units, keeps_state=keeps_state)
            )
            if decision is None or decision.checkpoint_step is None:
                tensors_of_part[s] = held_tensors | steps[s].tape
                if decision is not None:
                    tape = steps[s].tape | steps[s].state
                    pending_spans.append(
                        (
                            s + 1,
                            t,
                            free_units - decision.held_units,
                            held_tensors | tape,
                            keeps_state,
                        )
                    )
                continue
            stored_step = decision.checkpoint_step - 1
            is_freed = bool(
                self.min_times_with_state(s, stored_step)[free_units]
                > self.min_time_s[s, stored_step, False][free_units]
            )
            if is_freed:
                freed_steps.add(stored_step)
            state = steps[stored_step].state
            pending_spans.append(
                (
                    decision.checkpoint_step,
                    t,
                    free_units - decision.held_units,
                    held_tensors | state,
                    keeps_state,
                )
            )
            pending_spans.append((s, stored_step, free_units, held_tensors, not is_freed))
        return tensors_of_part, freed_steps

    def sequence_time_s(self, first: int, last: int, free_bytes: int) -> float:
        """Return the minimum time to recompute steps `first` to `last`, each for its part [s].

        `ChainStep.state` of `last` is in RAM, and stays there if its part reads it, and keeping it
        fits and is not slower. inf if `free_bytes` do not suffice.
        """
        units = min(free_bytes // self.unit_bytes, self.max_units)
        return math.inf if units < 0 else min(self._min_times_freed_and_kept(first, last, units))

    def follow_sequence(
        self, first: int, last: int, free_bytes: int, outer_tensors: frozenset[int]
    ) -> tuple[dict[int, frozenset[int]], set[int]]:
        """Follow the fastest decisions to recompute steps `first` to `last`, each for its part.

        Returns, by step, the tensors in RAM when its part begins, `outer_tensors` included, and the
        steps whose state is freed before. `free_bytes` must suffice: `sequence_time_s` is finite.
        """
        units = min(free_bytes // self.unit_bytes, self.max_units)
        freed_s, kept_s = self._min_times_freed_and_kept(first, last, units)
        tensors_of_part, freed_steps = self.follow_decisions(
            first, last, units, outer_tensors, keeps_last_state=bool(kept_s <= freed_s)
        )
        return tensors_of_part, freed_steps | ({last} if kept_s > freed_s else set())

    def _min_times_freed_and_kept(self, first: int, last: int, units: int) -> tuple[float, float]:
        """Return the minimum times if the state of the last step is freed, and if it stays [s]."""
        freed_times, kept_times = (
            self.min_time_s[first, last, keeps_state] for keeps_state in (False, True)
        )
        return float(freed_times[units]), float(kept_times[units])

    def best_decision(self, s: int, t: int, max_units: int, *, keeps_state: bool) -> _Decision:
        """Return the fastest first decision for steps ``s..t``, the first in ties.

        `max_units` exclude the state before step `s`, and must suffice for a decision. With
        `keeps_state`, the state of step `t` is in memory, and counted.
        """
        possible_decisions = (
            decision
            for decision in self.decisions(s, t, keeps_state=keeps_state)
            if decision.min_units <= max_units
        )
        return min(
            possible_decisions,
            key=lambda decision: self.times_after_decision(
                decision, s, t, max_units, max_units, keeps_state=keeps_state
            )[0],
        )

    # -- memory of steps, in units ---------------------------------------------------------------

    def single_step_memory_and_time(self, s: int, *, keeps_state: bool) -> tuple[int, float]:
        """Return the memory [units] for step `s` and its part alone, and the step's time [s].

        The state before the step and the time of the part are not counted. With `keeps_state`, only
        the rest of the tape is computed. A step that its part does not read takes no time, except
        the last one, which the forward pass computes anyway.
        """
        part_bytes = self.chain.freeing_bytes[s]
        if keeps_state:
            return self.to_units(
                max(part_bytes, self.chain.tape_completion_bytes(s))
            ), self.tape_completion_s[s]
        if self.chain.steps[s].tape or s == len(self.chain.steps) - 1:
            return self.to_units(
                max(part_bytes, self.chain.peaks(s, s).taped_bytes)
            ), self.forward_s[s]
        return self.to_units(part_bytes), 0.0

    def state_units(self, s: int) -> int:
        """Return the size of the state of step `s` [units]."""
        return self.to_units(self.chain.total_bytes(self.chain.steps[s].state))

    def part_state_bytes(self, s: int) -> int:
        """Return the bytes of the state of step `s` that part `s` reads [B]."""
        return self.chain.total_bytes(self.chain.steps[s].state & self.chain.steps[s].tape)

    def to_units(self, size_bytes: int) -> int:
        """Return `size_bytes` in memory units, rounded up."""
        return -(-size_bytes // self.unit_bytes)
