"""The simulator of plans: metrics of the machine's execution, and violated limits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from poetmodel.errors import PlanError
from poetmodel.plan.check import PlanCheck
from poetmodel.schedule.instructions import Op
from poetmodel.schedule.machine import Machine
from poetmodel.schedule.metrics import Display, simulated_metrics
from poetmodel.schedule.step_work import StepWork
from poetmodel.schedule.verification import false_metrics
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from poetmodel.device import Costs, Device
    from poetmodel.graph import Graph
    from poetmodel.plan.program import Plan
    from poetmodel.problem import Problem
    from poetmodel.schedule.homes import Homes


def check_plan(
    graph: Graph,
    costs: Costs | None,
    plan: Plan,
    *,
    ram_budget_bytes: int | None = None,
    aux_bytes: int | None = None,
) -> PlanCheck:
    """Simulate a plan; return its metrics and every violation.

    Parameters
    ----------
    graph : Graph
        The training graph.
    costs : Costs or None
        Costs for times and energy; None for checks of memory and order only. The plan's `commit`,
        unless None, replaces that of the costs.
    plan : Plan
        The program.
    ram_budget_bytes : int, optional
        RAM for tensors and workspaces [B]. Default: the plan's budget, else no limit.
    aux_bytes : int, optional
        Storage for paged-out tensors and state on storage [B]. Default: that of the device of the
        costs, else no limit.

    Returns
    -------
    PlanCheck
        Times, RAM, energy and violations. Never raises for an invalid program.

    Raises
    ------
    PlanError
        If the plan is for another graph; never for a plan without an identity.
    CostError
        If the costs do not match the graph.
    TimeLimitError
        If a time limit of the calling context passes.

    Notes
    -----
    Inputs of a computation must be in RAM without a pending page-in, unless the core reads them
    on storage in place. A page-in allocates its RAM when it is issued. A ``dma`` transfer is
    pending until a wait for it, and its tensor must not be freed before. A blocking program has one
    clock: its makespan is the sum of compute and transfer time, each added up as for schedules. A
    ``dma`` program executes transfers one at a time, in program order, in parallel with
    computations.

    The ``compute`` of state on storage is its first read, a page-in, unless the core reads state in
    place. Resident state occupies RAM during the whole step. A computation writes a replacement
    over its state tensor. An in-place operator overwrites an input that has no pending transfer and
    is freed right after the computation.
    """
    check_identity(graph, plan)
    device = costs.device if costs is not None else None
    homes = plan.homes(graph)
    if costs is not None and plan.commit is not None:
        costs = replace(costs, commit=plan.commit)
    table = None if costs is None else costs.table(graph)
    machine = Machine(homes, plan.program, mode=plan.mode, table=table)
    machine.execute()
    counts = machine.counts
    work = StepWork(
        table=table,
        computations=counts[Op.COMPUTE],
        page_ins=counts[Op.PAGE_IN],
        page_outs=counts[Op.PAGE_OUT],
    )
    peaks = [record.peak_bytes for record in machine.records]
    peak_bytes = max(peaks, default=0)
    check = PlanCheck(
        violations=(
            *_home_faults(plan, homes, device),
            *(fault.message for fault in machine.faults),
        ),
        records=tuple(machine.records),
        peak_ram_bytes=peak_bytes,
        peak_position=peaks.index(peak_bytes) if peaks else None,
        **work.traffic(homes)._asdict(),
        table=table,
        device=device,
        **_time_and_energy_metrics(
            machine, work, device.idle_power_w if device is not None else 0.0
        ),
    )
    budget = plan.ram_budget_bytes if ram_budget_bytes is None else ram_budget_bytes
    storage_bytes = aux_bytes if aux_bytes is not None or device is None else device.aux_bytes
    limit_violations = _limit_violations(check, budget, storage_bytes)
    return replace(check, violations=(*check.violations, *limit_violations))


def check_plan_of(
    problem: Problem, plan: Plan, *, ram_budget_bytes: int | None = None
) -> PlanCheck:
    """Simulate a plan with the costs and within the storage limit of a problem, as `check_plan`."""
    return check_plan(
        problem.graph,
        problem.costs,
        plan,
        ram_budget_bytes=ram_budget_bytes,
        aux_bytes=problem.aux_limit_bytes,
    )


def check_identity(graph: Graph, plan: Plan) -> None:
    """Raise `PlanError` if the plan is for another graph; accept a plan without an identity."""
    if plan.identity is not None:
        plan.identity.check(graph, kind="plan", error=PlanError)


def false_claims(check: PlanCheck, stated: Mapping[str, float | None]) -> Iterator[str]:
    """Yield a message per stated metric that differs from the simulation; ignore None there."""
    yield from false_metrics(simulated_metrics(Display.PLAN_FILE, check), stated)


def _home_faults(plan: Plan, homes: Homes, device: Device | None) -> Iterator[str]:
    """Yield an error for resident tensors that are no state, and for a wrong memory mapping."""
    yield from homes.resident_faults
    if device is not None and homes.on_storage and homes.is_mapped != device.is_memory_mapped:
        yield (
            "memory_mapped: the plan reads state on storage "
            f"{'in place' if plan.memory_mapped else 'into RAM'}, and the storage of "
            f"{device.short_name} is {'not ' if plan.memory_mapped else ''}memory-mapped"
        )


def _limit_violations(
    check: PlanCheck, ram_budget_bytes: int | None, aux_bytes: int | None
) -> Iterator[str]:
    """Yield a message if the peak or the used storage exceeds its limit; None is no limit."""
    peak_bytes, used_bytes = check.peak_ram_bytes, check.aux_used_bytes
    if ram_budget_bytes is not None and peak_bytes > ram_budget_bytes:
        yield (
            f"instruction {check.peak_position}: peak RAM {peak_bytes:,} B is "
            f"{format_bytes(peak_bytes - ram_budget_bytes)} above the {ram_budget_bytes:,} B that "
            "tensors may use"
        )
    if aux_bytes is not None and used_bytes > aux_bytes:
        yield f"storage used {used_bytes:,} B is above the limit of {aux_bytes:,} B"


def _time_and_energy_metrics(
    machine: Machine, work: StepWork, idle_power_w: float
) -> dict[str, Any]:
    """Return times and energy with commits and idle power, by field; {} without costs."""
    if work.table is None:
        return {}
    # Replacements of resident state are written after all other actions, then the commit's record.
    commit_cost = work.table.commit_totals(work.page_outs)
    parallel_s = max(machine.core_s, machine.bus_s) + commit_cost.time_s
    makespan_s = parallel_s if machine.is_dma else work.compute_cost.time_s + work.transfer_s
    return {
        "compute_s": work.compute_cost.time_s,
        "transfer_s": work.transfer_s,
        "stall_s": machine.stall_s,
        "makespan_s": makespan_s,
        "energy_j": work.energy_j(idle_power_w, makespan_s),
    }
