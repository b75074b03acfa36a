"""Compiled steps as a method of training, with what there is to say of their plans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from poetmodel import torch as pmt
from poetmodel.errors import BudgetError, NoScheduleError
from poetmodel.torch.coarsening import coarsened, floor_bytes, keep_all_bytes
from pytorch.cells import KEEP_ALL, OURS
from pytorch.peers import Method

if TYPE_CHECKING:
    from pytorch.cells import Cell
    from pytorch.networks import Training


class NoPlanError(Exception):
    """There is no plan within the budget, or none was found in time.

    Parameters
    ----------
    facts : dict
        What a record says of it: status, reason, budget, floor, times.
    """

    def __init__(self, facts: dict[str, Any]) -> None:
        super().__init__(facts["reason"])
        self.facts = facts


def compiled(training: Training, cell: Cell, *, folder: str, ram_bytes: int | None) -> Method:
    """Compile a step that keeps a budget.

    Parameters
    ----------
    training : tuple
        Model, loss function and inputs.
    cell : Cell
        Which kind of step, its share, and the solver's limit.
    folder : str
        Where pages lie.
    ram_bytes : int, optional
        The budget, in place of the share [B].

    Raises
    ------
    NoPlanError
        If there is no plan.
    """
    model, loss_fn, inputs = training
    paging, recompute = OURS.get(cell.own or "", (False, False))
    ram = ram_bytes if ram_bytes is not None else f"{_share(cell):.0%}"
    try:
        step = pmt.compile(
            model, loss_fn, inputs, ram=ram, storage=folder, paging=paging, recompute=recompute,
            minimize="energy", time_limit=cell.limit_s, rollback=False,
        )  # fmt: skip
    except (NoScheduleError, BudgetError) as error:
        raise NoPlanError(_refused(training, cell, ram_bytes, error)) from error
    found, result = step.compiled, step.result
    return Method(
        run=step,
        written_bytes=lambda: found.runner.traffic.written_bytes,
        details={
            "status": str(result.status),
            "reason": result.reason,
            "gap": result.gap,
            "budget_bytes": found.budget_bytes,
            "floor_bytes": floor_bytes(found.coarse),
            "keep_all_bytes": found.keep_all_bytes,
            "plan_peak_bytes": found.peak_bytes,
            "plan_time_s": found.check.makespan_s,
            "plan_written_bytes": found.check.written_bytes,
            "instructions": len(found.plan.program),
            "trace_s": found.trace_s,
            "profile_s": found.profile_s,
            "solve_s": result.build_s + result.solve_s,
            "compile_s": found.compile_s,
            "costs": list(found.notes),
            "versions": dict(result.versions),
        },
    )


def _share(cell: Cell) -> float:
    return 1.0 if cell.own == KEEP_ALL else cell.share or 1.0


def _refused(
    training: Training, cell: Cell, ram_bytes: int | None, error: NoScheduleError | BudgetError
) -> dict[str, Any]:
    """Return what a record says of a cell without a plan."""
    traced = pmt.trace(*training)
    whole = keep_all_bytes(traced)
    budget = ram_bytes if ram_bytes is not None else int(_share(cell) * whole)
    facts = {
        "status": "infeasible",
        "reason": str(error),
        "budget_bytes": budget,
        "floor_bytes": floor_bytes(coarsened(traced, budget_bytes=budget)),
        "keep_all_bytes": whole,
    }
    if isinstance(error, NoScheduleError):
        result = error.result
        facts |= {"status": str(result.status), "solve_s": result.build_s + result.solve_s}
    return facts
