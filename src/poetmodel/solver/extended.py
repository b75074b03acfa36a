"""A user's model of a problem, as a task: by ``lazy`` where rows can be stated so, else itself."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Final

from poetmodel.clock import time_limit
from poetmodel.errors import InputError, TimeLimitError
from poetmodel.problem import LinearRow, Problem
from poetmodel.result import OwnObjective, Termination
from poetmodel.solver.added import (
    added_rows,
    as_problem,
    names_page_outs,
    own_objective,
    row_check,
)
from poetmodel.solver.monolithic import nothing_keeps, prove_model, states_problem
from poetmodel.solver.outcome import Candidate, Outcome, as_candidate, reported_bound
from poetmodel.solver.request import GRACE_S, Request
from poetmodel.solver.task import Task

if TYPE_CHECKING:
    from collections.abc import Callable

    from poetmodel.schedule import Schedule

AS_TOTALS: Final = (
    "poetmodel: the constraints added to the model are on totals, so that lazy solves the problem "
    "with them"
)
AS_STAGE_LIMITS: Final = (
    "poetmodel: the constraints added to the model name stages, so that lazy solves the problem "
    "and enforces those that its answers break"
)


@dataclass(frozen=True, kw_only=True)
class ModelTask(Task):
    """A model that `build` made, with whatever was added to it.

    Whether a schedule keeps its rows is known only once it is compiled.
    """

    model: Any
    restates: ClassVar[bool] = False

    @classmethod
    def of(cls, model: Any, formulation: str | None) -> ModelTask:
        """Return the task of a model, which is solved as it was built."""
        problem = getattr(model, "problem", None)
        if not isinstance(problem, Problem):
            raise InputError(
                "solve takes a Problem or a model made by build(problem), which carries its problem"
            )
        name = model.formulation.name
        if formulation is not None and not name.startswith(formulation):
            raise InputError(
                f"formulation: the model was built as {name!r}; leave it out, or pass the problem"
            )
        return cls(problem=problem, formulation=name, model=model)

    @property
    def exact(self) -> bool:
        """Whether what is proved of it holds for the problem."""
        return bool(self.model.exact) and states_problem(self.model)

    @property
    def planned(self) -> Problem:
        """The problem, with page-outs that no page-in needs where something added wants them."""
        if names_page_outs(self.model):
            return self.problem.surrogate(wants_page_outs=True)
        return self.problem

    @cached_property
    def added(self) -> list[LinearRow] | None:
        """The rows that were added to the model, as far as they are over its decisions alone."""
        return added_rows(self.model)

    def row_check(
        self,
        problem: Problem,  # noqa: ARG002 - the rows are those of the model
    ) -> tuple[Callable[[Schedule], bool] | None, bool]:
        """Return what tells whether a valid schedule keeps the rows of the model."""
        return row_check(self.model, self.added), True

    def answer(self, problem: Problem, request: Request, start: Schedule | None) -> Outcome:
        """Solve the model as a problem where what was added to it can be stated so."""
        stated = None
        if problem is self.problem:  # a surrogate is not what the model states
            with time_limit(request.remaining_s() + GRACE_S), suppress(TimeLimitError):
                stated = as_problem(self.model, self.added)
        if stated is None:
            return super().answer(problem, request, start)
        own = stated.objective != problem.objective
        within = request
        if own:  # progress of the user's own objective says nothing of the problem's
            within = replace(request, on_progress=lambda _: request.report(None, None))
        outcome = Task(problem=stated, formulation="lazy").answer(stated, within, start)
        told = AS_STAGE_LIMITS if stated.stand_in.rows else AS_TOTALS
        outcome = replace(outcome, log=f"{told}\n{outcome.log}")
        if own:
            outcome = self._with_own_objective(stated, outcome)
        if outcome.infeasible:
            reason = nothing_keeps(problem, self.model.formulation)
            instead = "" if stated.stand_in.rows else ", or problem.subject_to, which drops nothing"
            return replace(outcome, reason=reason + instead)
        if outcome.candidate is None and outcome.termination == Termination.STALLED:
            after = super().answer(problem, request, start)
            return after.with_parts([outcome, after])
        return outcome

    def prove(
        self,
        stated: Problem,
        request: Request,
        start: Candidate | None,
        bound: float = 0.0,  # noqa: ARG002 - a model is solved as a whole
    ) -> Outcome:
        """Solve the model, for a surrogate of its problem."""
        return prove_model(self.model, request, start=start, trimmed=False, problem=stated)

    def _with_own_objective(self, stated: Problem, outcome: Outcome) -> Outcome:
        """Return an outcome of the model's own objective, `stated` as a problem's."""
        best, objective = outcome.candidate, own_objective(self.model)
        if best is None or objective is None:
            return replace(outcome, bound=0.0)
        sign, baseline = objective.sense, stated.objective.baseline
        own = OwnObjective(
            name=objective.name,
            sense="minimize" if sign > 0 else "maximize",
            value=sign * (baseline + best.value),
            bound=sign * (baseline + reported_bound(stated, best, outcome.bound)),
        )
        candidate = replace(as_candidate(self.problem, best.schedule), own=own)
        return replace(outcome, candidate=candidate, bound=0.0)
