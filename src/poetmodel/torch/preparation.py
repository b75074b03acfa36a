"""A captured step made ready to run: measured, solved, planned, and turned into a program."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from poetmodel.device import Costs, Device, StorageMode
from poetmodel.errors import BudgetError, InputError, VerificationError, shown
from poetmodel.plan import check_plan
from poetmodel.planner import make_plan
from poetmodel.problem import DeadlineCounts, Problem
from poetmodel.solve import solve
from poetmodel.torch.coarsening import coarse_costs, coarsened, keep_all_bytes
from poetmodel.torch.failures import CaptureError
from poetmodel.torch.guards import Signature, signature
from poetmodel.torch.profiling import Profile, measure
from poetmodel.torch.requirement import require_torch
from poetmodel.torch.runtime import Runner
from poetmodel.torch.tracing import Trace, trace
from poetmodel.units import format_bytes, parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from poetmodel.plan import Plan, PlanCheck
    from poetmodel.result import SolveResult
    from poetmodel.torch.coarsening import Coarse


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
    minimize: str
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
        if self.paging and self.storage is None:
            faults.append("paging: needs a folder for pages; give storage=, or paging=False")
        if self.device is not None and self.profile is not None:
            faults.append("give a device or a profile, not both")
        if faults:
            raise InputError(faults)

    @property
    def pages(self) -> bool:
        """Whether tensors may be paged."""
        return self.storage is not None if self.paging is None else self.paging


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
    """What the judge of plans says about it."""
    signature: Signature
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


def prepare(
    model: torch.nn.Module,
    loss_fn: Callable[..., torch.Tensor] | None,
    inputs: Sequence[Any],
    options: Options,
) -> Compiled:
    """Trace a step, find its costs, solve, plan, and compile the program.

    Parameters
    ----------
    model, loss_fn, inputs
        As for `poetmodel.torch.compile`.
    options : Options
        Its other parameters.

    Raises
    ------
    PoetModelError
        As `poetmodel.torch.compile` does.
    """
    require_torch()
    begin = perf_counter()
    _check_host(model)
    traced = trace(model, loss_fn, inputs)
    trace_s = perf_counter() - begin
    whole = keep_all_bytes(traced)
    budget = parse_size(options.ram, field="ram", whole_bytes=whole)
    coarse = coarsened(traced, budget_bytes=budget)
    before = perf_counter()
    all_costs, notes = _costs(traced, options)
    profile_s = perf_counter() - before
    costs = coarse_costs(all_costs, coarse.graph)
    result, plan, check = _planned(coarse, costs, budget, options)
    runner = Runner(traced, plan, coarse.numbers, folder=options.storage, rollback=options.rollback)
    return Compiled(
        trace=traced,
        coarse=coarse,
        costs=costs,
        notes=notes,
        budget_bytes=budget,
        keep_all_bytes=whole,
        result=result,
        plan=plan,
        check=check,
        signature=signature(traced.joint, traced.joint.inputs),
        runner=runner,
        trace_s=trace_s,
        profile_s=profile_s,
        compile_s=perf_counter() - begin,
    )


def _check_host(model: torch.nn.Module) -> None:
    import torch

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
    if isinstance(given, Profile):
        return given.costs, given.notes
    if given is not None:
        return given, (f"costs: {given.source or 'as given'}",)
    if options.device is not None:
        device = options.device
        if not isinstance(device, Device):
            device = Device.load(device)
        costs = Costs.estimate(traced.graph, device)
        return costs, (f"costs: estimated for {costs.source}",)
    if options.pages and options.storage is not None:
        Path(options.storage).mkdir(parents=True, exist_ok=True)
        found = measure(traced, folder=options.storage)
    else:
        found = measure(traced, folder=tempfile.gettempdir())
    return found.costs, found.notes


def _planned(
    coarse: Coarse, costs: Costs, budget: int, options: Options
) -> tuple[SolveResult, Plan, PlanCheck]:
    """Solve, and make the plan; its budget is what is left beside what is reserved."""
    usable = budget - coarse.reserved_bytes
    if usable <= 0:
        msg = (
            f"ram: {format_bytes(budget)} are less than the {format_bytes(coarse.reserved_bytes)} "
            f"that tensors of less than {coarse.threshold_bytes:,} B take"
        )
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
        minimize=options.minimize,
    )
    result = solve(problem, time_limit=options.time_limit, gap=options.gap)
    if result.schedule is None:
        beside = f"{coarse.reserved_bytes:,} B more are reserved for small tensors and results"
        result = replace(result, reason=f"{result.reason}; {beside}")
    mode = StorageMode.DMA if overlaps else StorageMode.BLOCKING
    plan = make_plan(
        coarse.graph, costs, result.require_schedule(), mode=mode, ram_budget_bytes=usable
    )
    check = check_plan(coarse.graph, costs, plan, ram_budget_bytes=usable)
    if check.violations:
        raise VerificationError(check.violations)
    return result, plan, check
