"""One budget for a step of several calls: the choice of a plan for each call.

The first step executes each call by the plan that saves the fewest bytes, except a first call that
is not expected to wait with other calls, which is planned alone. Then all calls are known, and a
small integer program chooses among the plans of each graph. It minimizes the time of all calls,
subject to, for each pass and for the interval between forward and backward passes::

    sum(saved[c, plan of c] for calls c that wait) + peak[pass, plan of its call] + fixed <= budget

`fixed` is the memory that does not depend on the choice: results, returned gradients, calls with
one plan, parameters that FSDP2 gathered, buckets of DDP, and, in the interval, the stated memory
outside of compiled functions.

In a group, the first process chooses when all processes have had the step; the others use its
choice from their next such step on. None waits, because what is a step depends on when tensors are
freed, which differs between processes; until then, calls have the plans of a first step.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from poetmodel.torch.dynamo.frontier import Frontier, KnownPlan
    from poetmodel.torch.dynamo.planning import GraphPlan, PassPeaks
    from poetmodel.torch.dynamo.ranks import RankExchange

_LOG: Final = logging.getLogger(__name__)
_CHOICE_LIMIT_S: Final = 5.0
"""Time limit of a choice among plans [s]."""
_MAX_CHOICES: Final = 4
"""Maximum number of different steps for which plans are chosen; the calls of further ones have the
plans of a first step."""


class Moment(NamedTuple):
    """A moment at which the RAM of a step counts.

    A pass, or the interval before a backward pass that follows no backward pass.
    """

    frontier: Frontier | None
    """The plans of the graph; None for an interval, or for a graph with one plan."""
    number: int
    """Number of the call among those of the step with a choice of plans; otherwise -1."""
    is_backward: bool
    waiting_numbers: tuple[int, ...]
    """Numbers of waiting calls with a choice of plans, without the call of the pass itself."""
    fixed_bytes: int
    """RAM during the pass that no choice of plans changes [B]."""


@dataclass(frozen=True)
class StepPlan:
    """The plans of the calls of a step."""

    plans: tuple[GraphPlan, ...]
    """Plan of each call, by the number of the call."""
    peak_bytes: int
    """Peak of the step by these plans [B]."""
    budget_bytes: int
    keep_all_bytes: int
    """Peak of the step with everything kept [B]."""

    def __str__(self) -> str:
        n_plans = len({id(graph_plan) for graph_plan in self.plans})
        counts_text = f"{len(self.plans)} calls by {n_plans} plan{'s' if n_plans > 1 else ''}"
        return (
            f"a step of {counts_text}: peak {format_bytes(self.peak_bytes)} of "
            f"{format_bytes(self.budget_bytes)} (keep-all {format_bytes(self.keep_all_bytes)})"
        )


def make_step_key(moments: Sequence[Moment]) -> Hashable:
    """Return a key of the passes of a step, without sizes; steps with equal keys share a choice."""
    return tuple(
        (id(moment.frontier), moment.number, moment.is_backward, moment.waiting_numbers)
        for moment in moments
    )


def with_max_fixed_bytes(moments: Sequence[Moment], sizes: Sequence[Sequence[int]]) -> list[Moment]:
    """Return `moments` with the maximum of `sizes`, the `fixed_bytes` of each process."""
    return [
        moment._replace(fixed_bytes=max(moment_sizes))
        for moment, moment_sizes in zip(moments, zip(*sizes, strict=True), strict=True)
    ]


def has_choice(moments: Sequence[Moment]) -> bool:
    """Return whether the plans of a step are chosen: it has several calls, or concurrent ones."""
    frontiers = find_frontiers(moments)
    return len(frontiers) > 1 or any(
        frontier.graph_problem.call.has_concurrent_calls for frontier in frontiers
    )


def find_frontiers(moments: Sequence[Moment]) -> list[Frontier]:
    """Return the frontier of each call with a choice of plans, by ascending number of the call."""
    frontier_of = {
        moment.number: moment.frontier
        for moment in moments
        if moment.number >= 0 and moment.frontier is not None
    }
    return [frontier_of[number] for number in sorted(frontier_of)]


def peak_bytes(moments: Sequence[Moment], plans: Sequence[GraphPlan]) -> int:
    """Return the peak RAM of a step, with fixed bytes [B]; `plans` are by `Moment.number`."""
    peaks = [graph_plan.peaks for graph_plan in plans]
    return max(
        moment.fixed_bytes
        + sum(peaks[number].saved_bytes for number in moment.waiting_numbers)
        + (0 if moment.number < 0 else _pass_bytes(peaks[moment.number], moment))
        for moment in moments
    )


def choose_plans(
    moments: Sequence[Moment], candidates: Sequence[Sequence[GraphPlan]], budget_bytes: int
) -> list[GraphPlan] | None:
    """Return one of the `candidates` of each call, with the least total time within a budget.

    None if none was found. The solver stops at a gap of 0.1 %, or at `_CHOICE_LIMIT_S`.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import lil_array

    if not all(candidates):
        return None
    first_columns = np.cumsum([0, *map(len, candidates)])
    n_columns, n_calls = int(first_columns[-1]), len(candidates)
    times = np.array([graph_plan.time_s for call_plans in candidates for graph_plan in call_plans])
    scale_bytes = max(1, budget_bytes)
    # One column per call and plan; one row per pass, then one per call.
    rows = lil_array((len(moments) + n_calls, n_columns))
    upper_bounds, lower_bounds = (
        np.ones(len(moments) + n_calls),
        np.full(len(moments) + n_calls, -np.inf),
    )
    for row, moment in enumerate(moments):
        for number in moment.waiting_numbers:
            for column, graph_plan in enumerate(candidates[number], first_columns[number]):
                rows[row, column] += graph_plan.peaks.saved_bytes / scale_bytes
        if moment.number >= 0:
            for column, graph_plan in enumerate(
                candidates[moment.number], first_columns[moment.number]
            ):
                rows[row, column] += _pass_bytes(graph_plan.peaks, moment) / scale_bytes
        upper_bounds[row] = (budget_bytes - moment.fixed_bytes) / scale_bytes
    for number in range(n_calls):
        row = len(moments) + number
        rows[row, first_columns[number] : first_columns[number + 1]] = 1
        lower_bounds[row] = 1
    solution = milp(
        times / max(times.max(), 1e-12),
        integrality=np.ones(n_columns),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(rows.tocsr(), lower_bounds, upper_bounds),
        options={"time_limit": _CHOICE_LIMIT_S, "mip_rel_gap": 1e-3},
    )
    if solution.x is None:
        return None
    plans = [
        call_plans[int(np.argmax(solution.x[first_column : first_column + len(call_plans)]))]
        for call_plans, first_column in zip(candidates, first_columns, strict=False)
    ]
    return plans if peak_bytes(moments, plans) <= budget_bytes else None


class _FoundChoice(NamedTuple):
    """A choice of the first process, as the others can make it again."""

    plans: tuple[KnownPlan, ...]
    peak_bytes: int
    budget_bytes: int
    keep_all_bytes: int

    @classmethod
    def of(cls, choice: StepPlan, frontiers: Sequence[Frontier]) -> _FoundChoice:
        """Return a choice for other processes."""
        plans = zip(frontiers, choice.plans, strict=True)
        return cls(
            tuple(frontier.describe(graph_plan) for frontier, graph_plan in plans),
            choice.peak_bytes,
            choice.budget_bytes,
            choice.keep_all_bytes,
        )

    def adopt(self, frontiers: Sequence[Frontier]) -> StepPlan:
        """Return the choice with plans of this process."""
        plans = zip(frontiers, self.plans, strict=True)
        own_plans = tuple(frontier.adopt(known_plan) for frontier, known_plan in plans)
        return StepPlan(own_plans, *self[1:])


class StepPlanner:
    """Chooses plans for the calls of a step, when the calls of an earlier step are known.

    With a fraction of the keep-all peak, the first choice sets `budget_bytes`.
    """

    def __init__(self, keep_all_fraction: float | None, budget_bytes: int | None) -> None:
        self.keep_all_fraction = keep_all_fraction
        self.budget_bytes = budget_bytes
        self.step_plan: StepPlan | None = None
        """Plans of the current step; None if its calls have the plans of a first step."""
        self._choices: dict[Hashable, StepPlan | None] = {}
        """Chosen plans by `make_step_key` and modes; None if no choice was found."""
        self._posted_sizes: dict[Hashable, list[int]] = {}
        """Bytes that this process has posted for the others, by the keys of `_choices`."""

    @property
    def choices(self) -> list[StepPlan]:
        """The chosen plans of all different steps, in the order of the choices."""
        return [choice for choice in self._choices.values() if choice is not None]

    def choose_step_plan(
        self,
        moments: Sequence[Moment],
        modes: Hashable,
        ranks: RankExchange,
    ) -> StepPlan | None:
        """Choose the plans of a step by the passes of the previous one; set and return `step_plan`.

        None if no choice was found yet, and for further steps after `_MAX_CHOICES` different ones.
        Choices are cached by `make_step_key` and `modes`.
        """
        key = (make_step_key(moments), modes)
        if self._is_new(key):
            for choice in self._agree(moments, modes, ranks):
                self._choices[key] = choice
        self.step_plan = self._choices.get(key)
        return self.step_plan

    def tell(self, moments: Sequence[Moment], modes: Hashable, ranks: RankExchange) -> None:
        """Tell the first process of a step that ended in this one, so that it can choose plans."""
        if ranks.is_alone:
            return
        key = (make_step_key(moments), modes)
        sizes = [moment.fixed_bytes for moment in moments]
        if self._is_new(key) and self._posted_sizes.get(key) != sizes and has_choice(moments):
            self._posted_sizes[key] = sizes
            ranks.post(_make_text(moments, modes), sizes)

    def _is_new(self, key: Hashable) -> bool:
        return key not in self._choices and len(self._choices) < _MAX_CHOICES

    def _agree(
        self, moments: Sequence[Moment], modes: Hashable, ranks: RankExchange
    ) -> list[StepPlan | None]:
        """Return [the choice of the first process], chosen now if this is it; [] if not known."""
        if ranks.is_alone:
            return [self._choose(moments)]
        text = _make_text(moments, modes)
        plans_text = f"plans of {text}"
        if ranks.is_first:
            sizes = ranks.find_posts(text)
            if sizes is None:
                return []
            choice = self._choose(with_max_fixed_bytes(moments, sizes))
            ranks.post(plans_text, choice and _FoundChoice.of(choice, find_frontiers(moments)))
            return [choice]
        found_choices: list[_FoundChoice | None] = ranks.find_posts(plans_text, 1) or []
        choices = [found and found.adopt(find_frontiers(moments)) for found in found_choices]
        if choices and choices[0] is not None:
            self.budget_bytes = choices[0].budget_bytes
            _LOG.info("%s", choices[0])
        return choices

    def find_plan(self, frontier: Frontier, number: int) -> GraphPlan | None:
        """Return the plan chosen for call `number` of the step; None unless of `frontier`."""
        plans = () if self.step_plan is None else self.step_plan.plans
        if number >= len(plans):
            return None
        graph_plan = plans[number]
        return graph_plan if frontier.contains(graph_plan) else None

    def _choose(self, moments: Sequence[Moment]) -> StepPlan | None:
        """Choose and log a plan of each call, or None; the first choice sets `budget_bytes`."""
        frontiers = find_frontiers(moments)
        keep_all_bytes = peak_bytes(moments, [frontier.keep_all_plan for frontier in frontiers])
        if self.budget_bytes is None:
            self.budget_bytes = int((self.keep_all_fraction or 1.0) * keep_all_bytes)
        until_s = monotonic() + frontiers[0].graph_problem.settings.time_limit_s
        plans_by_frontier: dict[int, list[GraphPlan]] = {}
        for frontier in frontiers:
            if id(frontier) not in plans_by_frontier:
                plans_by_frontier[id(frontier)] = frontier.find_plans(self.budget_bytes, until_s)
        plans_by_call = [plans_by_frontier[id(frontier)] for frontier in frontiers]

        plans = choose_plans(moments, plans_by_call, self.budget_bytes)
        if plans is None:
            return None
        choice = StepPlan(
            plans=tuple(plans),
            peak_bytes=peak_bytes(moments, plans),
            budget_bytes=self.budget_bytes,
            keep_all_bytes=keep_all_bytes,
        )
        _LOG.info("%s", choice)
        return choice


def _make_text(moments: Sequence[Moment], modes: Hashable) -> str:
    """Return `make_step_key` with `modes` as a text that is equal in all processes."""
    frontiers = [moment.frontier for moment in moments]
    hashes = [frontier and frontier.graph_problem.graph.sha256 for frontier in frontiers]
    passes = [(moment.number, moment.is_backward, moment.waiting_numbers) for moment in moments]
    return str((hashes, passes, modes))


def _pass_bytes(peaks: PassPeaks, moment: Moment) -> int:
    """Return the peak of the pass of a moment, given the peaks of a plan [B]."""
    return peaks.backward_bytes if moment.is_backward else peaks.forward_bytes
