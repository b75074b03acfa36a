"""A captured step made ready to run: measured, solved, planned, and turned into a program."""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from poetmodel.device import Costs, Device, StorageMode
from poetmodel.errors import BudgetError, CostError, InputError, VerificationError, shown
from poetmodel.plan import check_plan
from poetmodel.planner import make_plan
from poetmodel.problem import DeadlineCounts, Problem, Quantity
from poetmodel.solver import solve
from poetmodel.torch.comparison import check_agreement
from poetmodel.torch.errors import CaptureError
from poetmodel.torch.guards import Guards, refuse_inputs, refuse_surroundings
from poetmodel.torch.inputs import check_inputs, flatten
from poetmodel.torch.pages import make_folder
from poetmodel.torch.profiling import Profile, measure
from poetmodel.torch.runtime import Runner
from poetmodel.torch.tracing import (
    Coarse,
    Trace,
    coarse_costs,
    coarsened,
    floor_bytes,
    keep_all_bytes,
    least_bytes,
    trace,
)
from poetmodel.units import parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from poetmodel.plan import Plan, PlanCheck
    from poetmodel.result import SolveResult


class Dynamic(StrEnum):
    """What a step does with inputs unlike those that it was compiled for."""

    ERROR = "error"
    """Say what differs."""
    RETRACE = "retrace"
    """Compile for them too, and keep both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What `compile` was asked for; its parameters say what each means."""

    ram: str | int
    storage: str | Path | None
    paging: bool | None
    recompute: bool
    device: str | Device | None
    profile: Profile | Costs | None
    minimize: str | None
    deadline: str | float | None
    time_limit: float
    gap: float
    background_io: bool
    rollback: bool
    dynamic: str

    def __post_init__(self) -> None:
        faults = []
        if self.dynamic not in tuple(Dynamic):
            faults.append(f"dynamic: expected error or retrace, got {shown(self.dynamic)}")
        if not _is_folder(self.storage):
            faults.append(f"storage: expected a folder, got {shown(self.storage)}")
        if self.paging and self.storage is None:
            faults.append("paging: needs a folder for pages; give storage=, or paging=False")
        if not _has_costs(self.profile):
            faults.append(f"profile: expected what `measure` returns, got {shown(self.profile)}")
        if self.device is not None and self.profile is not None:
            faults.append("give a device or a profile, not both")
        if faults:
            raise InputError(faults)

    def aim(self, costs: Costs) -> str:
        """Return what is minimized: as asked for, else energy with costs of a device, else time."""
        if self.minimize is not None:
            return self.minimize
        return Quantity.TIME if costs.device is None else Quantity.ENERGY

    @property
    def pages(self) -> bool:
        """Whether tensors may be paged."""
        return self.storage is not None if self.paging is None else self.paging


def _is_folder(value: object) -> bool:
    """Return whether a value names a folder, or none."""
    return value is None or (isinstance(value, str | Path) and value != "")


def _has_costs(value: object) -> bool:
    return value is None or isinstance(value, Profile | Costs)


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A step compiled for inputs of one form."""

    trace: Trace
    """The captured step."""
    coarse: Coarse
    """What was solved."""
    costs: Costs
    """Costs of what was solved."""
    notes: tuple[str, ...]
    """How the costs came about."""
    budget_bytes: int
    """The budget for tensors and workspaces [B]."""
    keep_all_bytes: int
    """The peak of tensors and workspaces when everything is kept [B]."""
    result: SolveResult
    """What the solver found."""
    plan: Plan
    """What is run."""
    check: PlanCheck
    """What the check of plans says about it."""
    guards: Guards
    """What it holds for."""
    runner: Runner
    """The compiled program."""
    trace_s: float
    """Time that capturing took, with running it to find tensors and workspaces [s]."""
    profile_s: float
    """Time that finding the costs took [s]."""
    compile_s: float
    """Time that all of it took [s]."""

    @property
    def peak_bytes(self) -> int:
        """The peak that is promised: of the plan, and what is reserved beside it [B]."""
        return self.check.peak_ram_bytes + self.coarse.reserved_bytes

    @property
    def device(self) -> str | None:
        """The device that times of the plan are for; None for those of no named device."""
        device = self.costs.device
        return None if device is None else device.name


def prepare(
    model: torch.nn.Module,
    loss_fn: Callable[..., torch.Tensor] | None,
    inputs: Sequence[Any],
    options: Options,
    *,
    first: Compiled | None = None,
) -> Compiled:
    """Trace a step, find its costs, solve, plan, and compile the program.

    Parameters
    ----------
    model, loss_fn, inputs
        As for `poetmodel.torch.compile`.
    options : Options
        Its other parameters.
    first : Compiled, optional
        The same step for the inputs that came first: its budget is that of all.

    Raises
    ------
    PoetModelError
        As `poetmodel.torch.compile` does.
    """
    begin = perf_counter()
    _check_host(model)
    check_inputs(type(model).__name__, inputs)
    refuse_inputs(flatten(inputs)[0])  # before PyTorch warns of them
    traced = trace(model, loss_fn, inputs)
    guards = Guards(traced.joint)
    trace_s = perf_counter() - begin
    whole = keep_all_bytes(traced)
    budget = _budget_bytes(options, whole, first)
    coarse = coarsened(traced, budget_bytes=budget)
    before = perf_counter()
    all_costs, notes = _costs(traced, options)
    profile_s = perf_counter() - before
    costs = coarse_costs(all_costs, coarse.graph)
    result, plan, check = _planned(
        coarse, costs, Ram(traced=traced, given_bytes=budget, whole_bytes=whole), options
    )
    runner = Runner(traced, plan, coarse.numbers, folder=options.storage, rollback=options.rollback)
    compiled = Compiled(
        trace=traced,
        coarse=coarse,
        costs=costs,
        notes=notes,
        budget_bytes=budget,
        keep_all_bytes=whole,
        result=result,
        plan=plan,
        check=check,
        guards=guards,
        runner=runner,
        trace_s=trace_s,
        profile_s=profile_s,
        compile_s=perf_counter() - begin,
    )
    check_agreement(compiled)
    return replace(compiled, compile_s=perf_counter() - begin)


def _budget_bytes(options: Options, whole: int, first: Compiled | None) -> int:
    """Return the budget; a percentage is of the peak of the first form [B].

    The RAM of a host does not depend on its inputs. Where everything was kept, it still is.
    """
    if first is None or not str(options.ram).strip().endswith("%"):
        return parse_size(options.ram, field="ram", whole_bytes=whole)
    keeps = first.budget_bytes >= first.keep_all_bytes
    return max(first.budget_bytes, whole) if keeps else first.budget_bytes


def _check_host(model: torch.nn.Module) -> None:
    refuse_surroundings()
    if torch.is_autocast_enabled("cpu"):
        msg = "autocast is on: use it inside of the model and the loss, and compile outside of it"
        raise CaptureError(msg)
    if not isinstance(model, torch.nn.Module):
        return  # the capture says so
    kinds = {parameter.device.type for parameter in model.parameters()} - {"cpu"}
    if kinds:
        msg = (
            f"{type(model).__name__}: only steps on the cpu can be run, and parameters are on "
            f"{' and '.join(sorted(kinds))}"
        )
        raise InputError(msg)


def _costs(traced: Trace, options: Options) -> tuple[Costs, tuple[str, ...]]:
    """Return what the traced step costs, and how that was found."""
    given = options.profile
    if given is not None:
        costs = given.costs if isinstance(given, Profile) else given
        try:
            costs.table(traced.graph)
        except CostError as error:
            msg = f"profile: its costs are those of another step: {error}"
            raise InputError(msg) from None
        if isinstance(given, Profile):
            return costs, given.notes
        return costs, (f"costs: {costs.source or 'as given'}",)
    if options.device is not None:
        device = options.device
        if not isinstance(device, Device):
            device = Device.load(device)
        costs = Costs.estimate(traced.graph, device)
        return costs, (f"costs: estimated for {costs.source}",)
    if options.pages and options.storage is not None:
        make_folder(options.storage)
        found = measure(traced, folder=options.storage)
    else:
        found = measure(traced, folder=tempfile.gettempdir())
    return found.costs, found.notes


@dataclass(frozen=True, slots=True, kw_only=True)
class Ram:
    """The budget, and what of it a step can use."""

    traced: Trace
    """The step."""
    given_bytes: int
    """The budget for tensors and workspaces [B]."""
    whole_bytes: int
    """The peak when everything is kept; 100 % [B]."""

    def too_little(self, coarse: Coarse) -> str:
        """Return what of the budget is reserved, and the least one that is usable."""
        least = least_bytes(self.traced)
        needed = floor_bytes(coarse) - coarse.reserved_bytes
        reserves = "; ".join(f"{what} {size:,} B" for what, size in coarse.reserves if size)
        return (
            f"{self._told(self.given_bytes, round)} is too little: {coarse.reserved_bytes:,} B are "
            f"reserved ({reserves}), and operations need {needed:,} B beside that; give at least "
            f"ram={self._told(least, math.ceil)}"
        )

    def _told(self, size_bytes: int, rounded: Callable[[float], int]) -> str:
        return f"{size_bytes:,} B ({rounded(1000 * size_bytes / self.whole_bytes) / 10:g}%)"


def _reason(solver: str, coarse: Coarse, ram: Ram) -> str:
    """Return why there is no schedule, in terms of the user's budget."""
    if ram.given_bytes < floor_bytes(coarse):
        return f"ram: {ram.too_little(coarse)}; of what is not reserved: {solver}"
    return (
        f"{solver}; that RAM budget is ram={ram.given_bytes:,} B less the "
        f"{coarse.reserved_bytes:,} B that are reserved"
    )


def _planned(
    coarse: Coarse, costs: Costs, ram: Ram, options: Options
) -> tuple[SolveResult, Plan, PlanCheck]:
    """Solve, and make the plan; its budget is what is left beside what is reserved."""
    usable = ram.given_bytes - coarse.reserved_bytes
    if usable <= 0:
        msg = f"ram: {ram.too_little(coarse)}"
        raise BudgetError(msg)
    overlaps = options.background_io
    problem = Problem(
        coarse.graph,
        costs,
        ram=usable,
        deadline=options.deadline,
        deadline_counts=DeadlineCounts.OVERLAP if overlaps else DeadlineCounts.SERIAL,
        recompute=options.recompute,
        paging=options.pages,
        minimize=options.aim(costs),
    )
    result = solve(problem, time_limit=options.time_limit, gap=options.gap)
    if result.schedule is None:
        result = replace(result, reason=_reason(result.reason, coarse, ram))
    mode = StorageMode.DMA if overlaps else StorageMode.BLOCKING
    plan = make_plan(
        coarse.graph, costs, result.require_schedule(), mode=mode, ram_budget_bytes=usable
    )
    check = check_plan(coarse.graph, costs, plan, ram_budget_bytes=usable)
    if check.violations:
        raise VerificationError(check.violations)
    return result, plan, check
