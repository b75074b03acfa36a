"""A compiled step and its way there: captured, measured, solved, planned, checked against eager."""

from __future__ import annotations

import math
import sys
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Timer
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from poetmodel.budgets import Budget
from poetmodel.device import Costs, Device, StorageMode
from poetmodel.errors import BudgetError, InputError, shown
from poetmodel.planner import checked_plan
from poetmodel.problem import Problem, Quantity
from poetmodel.solver import solve
from poetmodel.torch.cache import Cache
from poetmodel.torch.capturing.guards import Guards, refuse_inference_mode, refuse_inputs
from poetmodel.torch.capturing.inputs import flatten, input_errors, refuse
from poetmodel.torch.compile_cache import KnownStep, is_settled
from poetmodel.torch.errors import CaptureError
from poetmodel.torch.runtime.comparison import check_agreement
from poetmodel.torch.runtime.convolutions import choose_divisions, divide_convolutions
from poetmodel.torch.runtime.profiling import MEASURING_S, Profile, measure
from poetmodel.torch.runtime.runner import Runner
from poetmodel.torch.state.pages import make_folder, release_memory
from poetmodel.torch.step.scheduled import (
    floor_bytes,
    keep_all_bytes,
    min_budget_bytes,
    scheduled_costs,
    scheduled_graph,
)
from poetmodel.torch.step.trace import Trace, capture_step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from poetmodel.graph import Graph
    from poetmodel.plan import Plan, PlanCheck
    from poetmodel.result import SolveResult
    from poetmodel.schedule import Schedule
    from poetmodel.solver.request import SolveProgress
    from poetmodel.torch.capturing.inputs import Inputs
    from poetmodel.torch.state.store import StateStore


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions:
    """Request of `compile`; its parameters describe each field."""

    ram: str | int
    storage: str | Path | None
    paging: bool | None
    recompute: bool
    device: str | Device | None
    minimize: str | None
    deadline: str | float | None
    time_limit: float
    gap: float
    rollback: bool
    dynamic: str
    accumulate: int
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
    clip_grad_norm: float | None
    cache: str | Path | bool

    def __post_init__(self) -> None:
        faults = []
        storage: Any = self.storage
        if self.dynamic not in ("error", "retrace"):
            faults.append(f"dynamic: expected error or retrace, got {shown(self.dynamic)}")
        if not isinstance(storage, str | Path | None) or storage == "":
            faults.append(f"storage: expected a folder, got {shown(storage)}")
        if self.paging and storage is None:
            faults.append("paging: needs a folder for pages; give storage=, or paging=False")
        if type(self.accumulate) is not int or self.accumulate < 1:
            faults.append(f"accumulate: expected 1 or more steps, got {shown(self.accumulate)}")
        elif self.accumulate > 1 and self.optimizer is not None:
            faults.append("accumulate: a step with an optimizer updates at once; leave one out")
        cache: Any = self.cache
        if not isinstance(cache, str | Path | bool) or cache == "":
            faults.append(f"cache: expected a folder, True or False, got {shown(cache)}")
        if faults:
            raise InputError(faults)

    @property
    def pages(self) -> bool:
        """Whether tensors may be paged."""
        return self.storage is not None if self.paging is None else self.paging


class Compiled:
    """A step compiled for inputs of one form: traced, costs found, solved, planned, and a program.

    Parameters and errors are those of `poetmodel.torch.compile`; `first` is the same step for the
    inputs that came first, whose budget is that of all; `tell` gets the stage that begins.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Callable[..., torch.Tensor] | None,
        inputs: Inputs,
        options: CompileOptions,
        *,
        first: Compiled | None = None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        begin = perf_counter()
        tell("capturing the step")
        _check_host(model)
        refuse(type(model).__name__, input_errors(inputs))
        refuse_inputs(flatten(inputs)[0])  # before PyTorch warns of them
        joint = capture_step(
            model,
            loss_fn,
            inputs,
            optimizer=options.optimizer,
            clip_grad_norm=options.clip_grad_norm,
        )
        joint = replace(joint, accumulate=options.accumulate)
        self.known = KnownStep(Cache.of(options.cache), joint)
        """Results of earlier compiles of the step."""
        self.trace = self.known.trace()
        self.guards = Guards(joint)
        self.trace_s = perf_counter() - begin
        """Time that capturing took, with running it to find tensors and workspaces [s]."""
        self.keep_all_bytes = keep_all_bytes(self.trace)
        """The peak of tensors and workspaces when everything is kept [B]."""
        self.budget_bytes = self._budget_bytes(options, first)
        """The budget for tensors and workspaces [B]."""
        divided = choose_divisions(self.trace, budget_bytes=self.budget_bytes)
        self.trace = divide_convolutions(self.trace, divided)
        self.scheduled = scheduled_graph(
            self.trace, budget_bytes=self.budget_bytes, homes=options.pages
        )
        """Solved problem, with `costs`."""
        before = perf_counter()
        tell("finding the costs of operations")
        costs, self.profile, self.notes = _costs(self.trace, options, self.known)
        """How the costs came about."""
        if divided:
            told = f"{len(divided)} operations run in parts, with the same bits"
            self.notes = (*self.notes, told)
        self.profile_s = perf_counter() - before
        """Time that finding the costs took [s]."""
        self.costs = scheduled_costs(costs, self.scheduled.graph)
        self.options = options
        self.homes: StateStore | None = None if first is None else first.homes
        """The state file, of all forms; None while no plan has state on storage."""
        tell("solving")
        self.result = self._solved(of_solve(tell))
        """Result of the solver, and the program that runs."""
        self.plan, self.check = self._planned(self.result)
        self.runner = self._runner(self.plan)
        tell("comparing with eager PyTorch")
        try:
            check_agreement(self.trace, self.runner)
        except BaseException:
            self.close()
            raise
        release_memory()
        self.compile_s = perf_counter() - begin

    @property
    def peak_bytes(self) -> int:
        """The peak that is promised: of the plan, and what is reserved beside it [B]."""
        return self.check.peak_ram_bytes + self.scheduled.reserved_bytes

    @property
    def device(self) -> str | None:
        """The device that times of the plan are for; None for those of no named device."""
        device = self.costs.device
        return None if device is None else device.name

    def _budget_bytes(self, options: CompileOptions, first: Compiled | None) -> int:
        """Return the budget; a percentage is of the peak of the first form [B].

        The RAM of a host does not depend on its inputs. Where everything was kept, it still is.
        """
        whole = self.keep_all_bytes
        budget = Budget.parse(options.ram)
        if first is None or budget.share is None:
            return budget.resolve(whole)
        keeps = first.budget_bytes >= first.keep_all_bytes
        return max(first.budget_bytes, whole) if keeps else first.budget_bytes

    def _problem(self) -> Problem:
        """Return the problem; its budget is the rest beside the reserved bytes."""
        scheduled, costs, options = self.scheduled, self.costs, self.options
        usable = self.budget_bytes - scheduled.reserved_bytes
        if usable <= 0:
            raise BudgetError(self._too_little())
        minimize = options.minimize
        if minimize is None:
            minimize = Quantity.TIME if costs.device is None else Quantity.ENERGY
        return Problem(
            scheduled.graph,
            costs,
            ram=usable,
            deadline=options.deadline,
            recompute=options.recompute,
            paging=options.pages,
            minimize=minimize,
        )

    def _solved(self, on_progress: Callable[[SolveProgress], None]) -> SolveResult:
        """Solve with the threads that PyTorch may use, which computes nothing meanwhile."""
        problem, options = self._problem(), self.options
        result = known = self.known.result(problem, gap=options.gap)
        if result is None or not is_settled(result, within_s=options.time_limit):
            result = solve(
                problem,
                threads=torch.get_num_threads(),
                time_limit=options.time_limit,
                gap=options.gap,
                start=None if known is None else known.schedule,
                on_progress=on_progress,
            )
            self.known.keep(result)
        if result.schedule is None:
            if self.budget_bytes < floor_bytes(self.scheduled):
                reason = f"{self._too_little()}; of what is not reserved: {result.reason}"
            else:
                reason = (
                    f"{result.reason}; that RAM budget is ram={self.budget_bytes:,} B less the "
                    f"{self.scheduled.reserved_bytes:,} B that are reserved; everything is kept at "
                    f"ram={self.keep_all_bytes:,} B"
                )
            result = replace(result, reason=reason)
        return result

    def _planned(self, result: SolveResult) -> tuple[Plan, PlanCheck]:
        """Make the plan of a result, and check it."""
        graph, costs = self.scheduled.graph, self.costs
        usable = self.budget_bytes - self.scheduled.reserved_bytes
        schedule = _settled(graph, result.require_schedule())
        mode = StorageMode.BLOCKING
        return checked_plan(graph, costs, schedule, mode=mode, ram_budget_bytes=usable)

    def _runner(self, plan: Plan) -> Runner:
        """Return the runner of a plan; state moves to its homes with the first step."""
        runner = Runner(
            self.trace,
            plan,
            self.scheduled.numbers,
            program=self.scheduled.to_operations(plan.program),
            folder=self.options.storage,
            rollback=self.options.rollback,
            homes=self.homes,
        )
        self.homes = runner.homes
        return runner

    def close(self) -> None:
        """Bring state to RAM, and remove the files."""
        self.runner.close()
        if self.homes is not None:
            self.homes.close()

    def _too_little(self) -> str:
        """Return the reserved part of the budget, and the least usable budget."""
        scheduled, whole = self.scheduled, self.keep_all_bytes

        def share(size_bytes: int, rounded: Callable[[float], int]) -> str:
            return f"{size_bytes:,} B ({rounded(1000 * size_bytes / whole) / 10:g}%)"

        needed = floor_bytes(scheduled) - scheduled.reserved_bytes
        reserves = "; ".join(f"{what} {size:,} B" for what, size in scheduled.reserves if size)
        return (
            f"ram: {share(self.budget_bytes, round)} is too little: {scheduled.reserved_bytes:,} B "
            f"are reserved ({reserves}), and operations need {needed:,} B beside that; give at "
            f"least ram={share(min_budget_bytes(self.trace, homes=self.options.pages), math.ceil)}"
        )


def _settled(graph: Graph, schedule: Schedule) -> Schedule:
    """Return a schedule with all state in RAM that takes no room there that is not reserved."""
    sizes = graph.tensor_bytes
    more = {i for i in graph.state_tensors if not sizes[i]}.difference(schedule.resident)
    if not more:
        return schedule
    new = graph.replacement_of
    state = more | {new[i] for i in more if i in new}
    others: dict[str, Any] = {
        name: tuple(pair for pair in getattr(schedule, name) if pair[1] not in state)
        for name in ("S_RAM", "S_AUX", "M_in", "M_out")
    }
    return replace(schedule, resident=tuple(sorted(more.union(schedule.resident))), **others)


def _check_host(model: torch.nn.Module) -> None:
    refuse_inference_mode()
    if torch.is_autocast_enabled("cpu"):
        raise CaptureError(
            "autocast is on: use it inside of the model and the loss, and compile outside of it"
        )
    if not isinstance(model, torch.nn.Module):
        return  # the capture says so
    kinds = {parameter.device.type for parameter in model.parameters()} - {"cpu"}
    if kinds:
        raise InputError(
            f"{type(model).__name__}: only steps on the cpu can be run, and parameters are on "
            f"{' and '.join(sorted(kinds))}"
        )


def _costs(
    traced: Trace, options: CompileOptions, known: KnownStep
) -> tuple[Costs, Profile | None, tuple[str, ...]]:
    """Return the costs of the traced step, its measurement if there was one, and notes on it."""
    if options.device is not None:
        device = options.device
        if not isinstance(device, Device):
            device = Device.load(device)
        costs = Costs.estimate(traced.graph, device)
        return costs, None, (f"costs: estimated for {costs.source}",)
    folder = options.storage if options.pages else None
    if folder is not None:
        make_folder(folder)
    profile = known.profile(
        traced, folder, partial(measure, traced, folder=folder, max_s=MEASURING_S)
    )
    return profile.costs, profile, profile.notes


# -- what compiling shows on a terminal --------------------------------------------------------


@contextmanager
def stages_shown(*, after_s: float = 0.0) -> Iterator[Callable[[str], None]]:
    """Give what names the stage; on stderr after some time, and only if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    shown = Progress(*columns, console=Console(stderr=True), transient=True)
    task = shown.add_task("compiling")
    timer = Timer(after_s, shown.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda stage: shown.update(task, description=f"compiling: {stage}")
    finally:
        timer.cancel()
        timer.join()
        shown.stop()


def of_solve(tell: Callable[[str], None]) -> Callable[[SolveProgress], None]:
    """Return a callback of a solve that names its gap."""

    def solved_so_far(progress: SolveProgress) -> None:
        tell("solving" if progress.gap is None else f"solving, gap {progress.gap:.2%}")

    return solved_so_far
