"""Open files of schedules and plans: each with its graph, problem and verdict."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from poetmodel.case.case import NO_COSTS, Case
from poetmodel.case.checked_plan import CheckedPlan, blocking_warnings
from poetmodel.clock import infrequent_gc
from poetmodel.device import Costs
from poetmodel.device.ram import DeviceRam
from poetmodel.errors import InputError, PlanError, ScheduleError
from poetmodel.graph import Graph, checkpoint_all_peak_bytes
from poetmodel.graph.catalogue import find_model_by_hash, load_model, model_names
from poetmodel.plan.simulation import check_identity as check_plan_identity
from poetmodel.planner import verify
from poetmodel.problem import Limits, Problem, Quantity
from poetmodel.problem.io import state_problem
from poetmodel.problem.rows import is_within
from poetmodel.schedule import (
    RELATIONS,
    ConstraintValue,
    Schedule,
    Simulation,
    Verdict,
    check_identity,
    constraint_values,
)
from poetmodel.schedule.document import ScheduleDocument, load_document
from poetmodel.schedule.io import ObjectiveEntry, ProblemEntry
from poetmodel.schedule.metrics import Display, metrics_at
from poetmodel.units import MAX_BYTES, format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping

    from poetmodel.plan import PlanCheck
    from poetmodel.plan.document import PlanDocument
    from poetmodel.result import SolveResult
    from poetmodel.schedule import GraphIdentity

_PLAN_LIMITS: Final = ("--ram", "--aux", "--deadline")
"""Limit options that apply to plans."""


def zero_costs(graph: Graph) -> Costs:
    """Return costs with zero time and energy for all computations and transfers, with storage."""
    zero_per_node, zero_per_transfer = [0.0] * len(graph.nodes), [(0.0, 0.0)] * len(graph.tensors)
    return Costs.from_arrays(
        graph,
        compute_time_s=zero_per_node,
        compute_energy_j=zero_per_node,
        page_in=zero_per_transfer,
        page_out=zero_per_transfer,
    )


def drop_unknown_pairs(graph: Graph, schedule: Schedule) -> Schedule:
    """Return a schedule without the pairs whose stage, node or tensor the graph lacks."""
    n_nodes, node_of = len(graph.nodes), graph.node_of
    relations = {
        name: tuple(
            (t, index)
            for t, index in getattr(schedule, name)
            if 0 <= index < (n_nodes if name == "R" else len(node_of)) and 0 <= t < n_nodes
        )
        for name in RELATIONS
    }
    return Schedule(**relations, resident=schedule.resident, identity=schedule.identity)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A schedule with its problem and verdict, and what its file states."""

    case: Case
    """Graph, device and profile, as a command line names them."""
    file: str
    """The schedule file."""
    document: ScheduleDocument
    schedule: Schedule
    """The schedule; an invalid one without pairs outside the graph."""
    problem: Problem
    """Stated by the file, else by limits on a command line. A file that states none has no limits,
    or those of the device for a command that continues with the schedule. Without costs, all times
    and energies are 0 and unlimited."""
    costs: Costs | None
    """None if they are unknown: times and energies were not verified."""
    verdict: Verdict
    notes: tuple[str, ...] = ()
    """Assumptions, and properties that were not verified."""
    label: str = "A"
    """Label on a page."""
    planned: CheckedPlan | None = None
    """The plan of the schedule, if it has one; see `with_plan`."""
    step: Mapping[str, Any] | None = None
    """Facts about the compiled PyTorch step that executes the plan; None without one."""
    reserved_bytes: int = 0
    """Bytes that a compiled step reserves in addition: tensors without decisions, and results."""

    @classmethod
    def of_result(
        cls, result: SolveResult, *, case: Case, file: str, verdict: Verdict | None = None
    ) -> Checked:
        """Return the schedule of a result; it is verified again if no `verdict` is given."""
        problem, document = result.problem, _document_of(result)
        if verdict is None:
            verdict = verify(problem, document.schedule, stated=document.stated_metrics)
        return cls(
            case=case,
            file=file,
            document=document,
            schedule=document.schedule,
            problem=problem,
            costs=problem.costs,
            verdict=verdict,
        )

    def of_step(self, step: Mapping[str, Any], planned: CheckedPlan) -> Checked:
        """Return a copy for a compiled step: ``step.report()``, plan, reserved bytes and a note."""
        notes = []
        if step["reserved_bytes"]:
            reserves_text = ", ".join(
                f"{kind} {format_bytes(size)}" for kind, size in step["reserves"].items()
            )
            notes.append(
                f"{format_bytes(step['reserved_bytes'])} of the step's RAM are reserved"
                f"{f': {reserves_text}' if reserves_text else ''}; all RAM on this page includes "
                "them"
            )
        return replace(
            self,
            step=step,
            planned=planned,
            reserved_bytes=int(step["reserved_bytes"]),
            notes=(*self.notes, *notes),
        )

    def with_plan(self, *, has_addresses: bool = True) -> Checked:
        """Return it with its plan and addresses, or with a note why there is no plan.

        Unchanged without costs, or if the schedule violates a rule of execution.
        """
        if self.costs is None or self.simulation.violations:
            return self
        problem, budget = self.problem, self.budget_bytes
        if self.document.problem is None:
            problem = problem.with_limit(Quantity.WRITES, None)  # that of the device
        try:
            planned = CheckedPlan.of_schedule(
                problem,
                self.document.schedule,
                ram_budget_bytes=budget if budget is None or budget > 0 else None,
            )
        except PlanError as error:
            return replace(self, notes=(*self.notes, f"there is no plan: {error}"))
        return replace(
            self,
            planned=planned.with_addresses() if has_addresses else planned,
            notes=(*self.notes, *blocking_warnings(problem)),
        )

    def require_valid(self) -> Checked:
        """Return it; raise `ScheduleError` if the verdict has violations."""
        if self.verdict.violations:
            raise ScheduleError(
                f"{self.file}: is not valid: {fault}" for fault in self.verdict.violations
            )
        return self

    def with_file_in_notes(self) -> Checked:
        """Return it with notes that begin with the file."""
        return replace(self, notes=tuple(f"{self.file}: {note}" for note in self.notes))

    @property
    def graph(self) -> Graph:
        """Graph of the problem."""
        return self.problem.graph

    @property
    def simulation(self) -> Simulation:
        """Simulation of the schedule, from the verdict."""
        return self.verdict.simulation

    @property
    def device_ram(self) -> DeviceRam | None:
        """Device RAM that the schedule uses, with reserved bytes; None without a device."""
        peak_use = self.simulation.peak_use.add_reserved_bytes(self.reserved_bytes)
        return DeviceRam.compare(self.problem.costs.device, self.graph, peak_use)

    @property
    def constraints(self) -> tuple[ConstraintValue, ...]:
        """Simulated values of the user-defined constraints."""
        return constraint_values(self.problem, self.simulation)

    @property
    def budget_bytes(self) -> int | None:
        """Usable RAM of the problem plus reserved bytes [B]; None if the file states no problem."""
        if self.document.problem is None:
            return None
        return self.problem.usable_ram_bytes + self.reserved_bytes

    @property
    def peak_ram_bytes(self) -> int:
        """Peak RAM plus reserved bytes [B]: simulated, or that of the plan for a compiled step."""
        is_step = self.step is not None and self.planned is not None
        peak_source = self.planned.check if is_step and self.planned else self.simulation
        return peak_source.peak_ram_bytes + self.reserved_bytes

    @property
    def keep_all_bytes(self) -> int:
        """Keep-all peak [B]; for a compiled step as in its report, with reserved bytes."""
        if self.step is not None:
            return int(self.step["keep_all_bytes"])
        return checkpoint_all_peak_bytes(self.graph)


def _document_of(result: SolveResult) -> ScheduleDocument:
    """Return the schedule document of a result: history unrounded, without `device_ram`."""
    values = result.to_dict()
    return ScheduleDocument(
        schedule=result.require_schedule(),
        device=values["device"],
        problem=ProblemEntry.model_validate(values["problem"]),
        status=values["status"],
        stated_metrics={metric.key: values.get(metric.key) for metric in metrics_at(Display.FILE)},
        objective=ObjectiveEntry.model_validate(values["objective"]),
        history=result.history,
    )


# -- schedule files ----------------------------------------------------------------------------


def open_schedule(
    path: Path,
    case: Case,
    *,
    graph: Graph | None = None,
    content: bytes | None = None,
    is_input: bool = False,
) -> Checked:
    """Verify a schedule file against its problem and statements; limits of `case` replace its own.

    With limits of the case, only metrics are compared, and only those of RAM if costs, counted time
    or commits differ. `is_input` is for commands that continue with the schedule: costs are
    required, and statements of other costs are dropped instead of refused.
    """
    document = load_document(path, content)
    if graph is None:
        graph, case = find_graph(case, document.schedule.identity, file=str(path))
    try:
        return _check_document(document, graph, case, file=str(path), is_input=is_input)
    except ScheduleError as error:
        raise error.with_prefix(str(path)) from None


def _check_document(
    document: ScheduleDocument, graph: Graph, case: Case, *, file: str, is_input: bool
) -> Checked:
    """Verify a parsed schedule file against a graph; `file` is its path, which is not read."""
    check_identity(graph, document.schedule)
    _check_names(document.schedule.identity, graph)
    costs, notes = _find_costs(document.device, graph, case)
    if costs is None and (is_input or case.limit_options):
        raise InputError(NO_COSTS)
    notes[:0] = document.notes
    problem, claims = _state_problem(document, graph, costs, case, notes, is_input=is_input)
    has_other_costs = costs is not None and document.has_other_costs(problem)
    stated = document.memory_claims() if costs is None or has_other_costs else claims
    with infrequent_gc():
        verdict = verify(problem, document.schedule, stated=None if is_input else stated)
    claim_notes: tuple[str, ...] = ()
    if costs is not None:
        claim_notes = tuple(document.compare_claims(problem, verdict.simulation, claims))
    return Checked(
        case=case,
        file=file,
        document=document.without_proofs() if claim_notes else document,
        schedule=document.schedule
        if verdict.valid
        else drop_unknown_pairs(graph, document.schedule),
        problem=problem,
        costs=None if costs is None else problem.costs,
        verdict=verdict,
        notes=(*notes, *claim_notes),
    )


def _state_problem(
    document: ScheduleDocument,
    graph: Graph,
    costs: Costs | None,
    case: Case,
    notes: list[str],
    *,
    is_input: bool,
) -> tuple[Problem, dict[str, float | None]]:
    """Return the problem, and the statements of the file that hold for it; add to `notes`."""
    entry = document.problem
    if case.limit_options and costs is not None:
        notes.append(f"{', '.join(case.limit_options)}: the limits of the file were not checked")
        problem = state_problem(graph, costs, case.absolute_limits(), case.constraint_files)
        has_same_settings = entry is None or (  # energy depends on both
            entry.limits().energy_settings == problem.energy_settings
        )
        return problem, document.stated_metrics if has_same_settings else document.memory_claims()
    if entry is None:
        if is_input and costs is not None:
            notes.append("the file states no problem: only the limits of the device hold")
            ram = MAX_BYTES if costs.device is None else None
            return Problem(graph, costs, ram=ram), document.claims
        notes.append("the file states no problem: no budget and no deadline were checked")
        problem = Problem(graph, costs or zero_costs(graph), ram=MAX_BYTES)
        return problem.with_limit(Quantity.WRITES, MAX_BYTES), document.claims
    if costs is not None:
        return entry.to_problem(graph, costs), document.claims
    return entry.without_costs().to_problem(graph, zero_costs(graph)), document.claims


# -- plan files --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedPlanFile:
    """A plan file with its graph and the verifier's check."""

    document: PlanDocument
    graph: Graph
    costs: Costs | None
    """None if they are unknown."""
    check: PlanCheck
    violations: tuple[str, ...]
    """Violations of rules, limits and addresses, and false statements."""
    notes: tuple[str, ...]

    @property
    def device_ram(self) -> DeviceRam | None:
        """Device RAM that the plan uses; None without a device."""
        device = None if self.costs is None else self.costs.device
        return DeviceRam.compare(device, self.graph, self.check.peak_ram_bytes)


def open_plan(path: Path, case: Case, *, content: bytes) -> CheckedPlanFile:
    """Verify a plan file, its addresses and its statements; limits of `case` replace its budget.

    Storage is by default the device's, the deadline limits the makespan, and other limits are
    refused.
    """
    from poetmodel.plan import check_arena, check_plan

    document, graph, case = _read_plan(content, case, file=str(path))
    limits, plan = case.absolute_limits(), document.plan
    try:
        check_plan_identity(graph, plan)
        _check_names(plan.identity, graph)
    except InputError as error:
        raise error.with_prefix(str(path)) from None
    costs, notes = _find_costs(plan.device, graph, case)
    budget_bytes, problem = plan.ram_budget_bytes, _plan_problem(graph, costs, case, limits)
    if limits.ram is not None:
        budget_bytes = problem.usable_ram_bytes
    if budget_bytes is None:
        notes.append("the plan states no RAM budget: its peak was not checked")
    check = check_plan(
        graph,
        costs,
        plan,
        ram_budget_bytes=budget_bytes,
        aux_bytes=None if limits.aux_bytes is None else problem.aux_limit_bytes,
    )
    false_claims, claim_notes = document.check_claims(check)
    arena = document.arena
    violations = [
        *check.violations,
        *(() if arena is None else check_arena(graph, plan, arena).violations),
        *false_claims,
    ]
    if check.makespan_s is not None and not is_within(check.makespan_s, problem.deadline_s):
        violations.append(
            f"makespan {format_seconds(check.makespan_s)} is above the deadline of "
            f"{format_seconds(problem.deadline_s or 0.0)}"
        )
    return CheckedPlanFile(
        document=document,
        graph=graph,
        costs=costs,
        check=check,
        violations=tuple(violations),
        notes=(*notes, *document.notes, *claim_notes),
    )


def _read_plan(content: bytes, case: Case, *, file: str) -> tuple[PlanDocument, Graph, Case]:
    """Parse a JSON or binary plan; return it with its graph, and the case of that graph."""
    from poetmodel.plan import decode
    from poetmodel.plan.binary import is_binary
    from poetmodel.plan.document import PlanDocument
    from poetmodel.plan.document import load_document as load_plan

    if not is_binary(content):
        document = load_plan(file, content)
        return document, *find_graph(case, document.plan.identity, file=file)
    try:
        graph = _find_binary_graph(case, content, file=file)
        return PlanDocument(plan=decode(content, graph), stated_metrics={}), graph, case
    except PlanError as error:
        raise error.with_prefix(file) from None


def _plan_problem(graph: Graph, costs: Costs | None, case: Case, limits: Limits) -> Problem:
    """Return the problem of a plan: RAM is unlimited without ``--ram``, unknown costs are 0."""
    unsupported_options = [name for name in case.limit_options if name not in _PLAN_LIMITS]
    if unsupported_options:
        raise InputError(
            f"{', '.join(unsupported_options)}: does not apply to a plan; verify its schedule file"
        )
    if costs is None and limits.deadline is not None:
        raise InputError(NO_COSTS)
    return Problem.from_limits(
        graph, costs or zero_costs(graph), replace(limits, ram=limits.ram or MAX_BYTES)
    )


# -- graphs and costs of files -----------------------------------------------------------------


def find_graph(case: Case, identity: GraphIdentity | None, *, file: str) -> tuple[Graph, Case]:
    """Return the graph of a case, else the built-in one that a file names, and the graph's case.

    Without sizes and state in the case, the variant of the network is found by its hash. A graph
    with the name in the file, but another hash, is refused; one of another name is not compared.
    """
    name = case.source
    if name is None:
        if identity is None or identity.name not in model_names():
            name_text = "" if identity is None else f", {identity.name!r}"
            raise InputError(
                f"missing graph: pass --graph FILE|MODEL with the graph of {file}{name_text}"
            )
        name = identity.name
        if not case.shape.overrides:
            match = find_model_by_hash(name, identity.sha256)
            if match is None:
                raise InputError(_other_sizes_message(identity, file))
            return match[0], replace(case, source=name, shape=match[1])
    case = replace(case, source=name)
    graph = case.load_graph()
    if identity is not None and identity.name == name and identity.sha256 != graph.sha256:
        raise InputError(_other_sizes_message(identity, file))
    return graph, case


def _find_binary_graph(case: Case, data: bytes, *, file: str) -> Graph:
    """Return the graph of a case, else the first built-in one with the hash in a binary plan."""
    if case.source is not None:
        return case.load_graph()
    from poetmodel.plan.binary import stored_fingerprint

    sha256 = stored_fingerprint(data).hex()
    for name in model_names():
        try:
            graph = load_model(name, case.shape)
        except InputError:  # the network does not support these sizes or this state
            continue
        if graph.sha256.startswith(sha256):
            return graph
    raise InputError(
        f"missing graph: {file} is for no built-in network (sha256 {sha256}...); give --graph "
        "FILE|MODEL, its sizes with --batch, --image or --sequence, or its state with --state, "
        "--in-place, --tile and --train"
    )


def _other_sizes_message(identity: GraphIdentity, file: str) -> str:
    return (
        f"{file}: is for another {identity.name!r} (sha256 {identity.sha256[:12]}...) than the "
        "built-in network; give its sizes with --batch, --image or --sequence, its state with "
        "--state, --in-place, --tile and --train, or give --graph FILE"
    )


def _check_names(identity: GraphIdentity | None, graph: Graph) -> None:
    """Raise `ScheduleError` if `identity` does not list a graph's nodes and tensors in order."""
    if identity is None:
        return
    for key, actual, expected in (
        ("nodes", identity.nodes, tuple(node.name for node in graph.nodes)),
        ("tensors", identity.tensors, tuple(tensor.name for tensor in graph.tensors)),
    ):
        if actual == expected:
            continue
        if len(actual) != len(expected):
            difference = f"expected {len(expected)} names, got {len(actual)}"
        else:
            i = next(i for i, name in enumerate(actual) if name != expected[i])
            difference = f"entry {i}: expected {expected[i]!r}, got {actual[i]!r}"
        raise ScheduleError(
            f"{key}: {difference}; the list must name the {key} of graph {graph.name!r} in order"
        )


def _find_costs(
    device_name: str | None, graph: Graph, case: Case
) -> tuple[Costs | None, list[str]]:
    """Return costs of a case, else estimates for the device in the file, or None; and notes."""
    from poetmodel.device.io import device_names

    is_known = device_name in device_names() or (device_name and Path(device_name).is_file())
    default_device = device_name if is_known else None
    if case.device is None and case.profile is None and default_device is None:
        return None, [
            "times and energies were not checked: give --device or --profile for the costs"
        ]
    costs = case.load_costs(graph, default_device=default_device)
    if default_device is None or case.device is not None or case.profile is not None:
        return costs, []
    return costs, [
        f"costs are the estimates of device {default_device}, which the file names; give --profile "
        "if it was solved with measured costs"
    ]
