"""``poetmodel explain``: decisions of a schedule, its full steps, and the cost of a decision."""

from __future__ import annotations

import math
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from poetmodel.cli import options
from poetmodel.cli.failures import print_room_warnings, print_warnings
from poetmodel.cli.inputs import read_valid_schedule
from poetmodel.cli.output import fact_table, listing, live_line, print_json, print_text, show
from poetmodel.errors import InputError, suggest_names
from poetmodel.problem import Quantity
from poetmodel.report.folding import DIGITS, Fold, fold
from poetmodel.report.presenter import (
    Fact,
    constraint_facts,
    metric_facts,
    plural,
    room_facts,
    state_facts,
    text_fact,
    to_json_object,
)
from poetmodel.schedule.identity import OBJECTIVE_BOUND
from poetmodel.schedule.metrics import Display, Group
from poetmodel.units import format_bytes, format_joules, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from poetmodel.graph import Graph
    from poetmodel.report.subject import VerifiedSchedule
    from poetmodel.schedule.decisions import Decision, InPlaceUse
    from poetmodel.schedule.simulation import MemoryPoint
    from poetmodel.solver.sensitivity import Alternative, RamStep


@options.group
class Arguments:
    """The schedule file, and one of its tensors."""

    schedule: Path = options.argument(
        options.REQUIRED, "SCHEDULE", "A schedule file, *.schedule.json."
    )
    tensor: str | None = options.argument(None, "TENSOR", "Explain only this tensor, in full.")


@options.command("poetmodel explain mlp.json --graph mlp")
def explain(
    arguments: Arguments,
    source: options.FileGraphOptions,
    costing: options.CostOptions,
    search: Annotated[
        options.SearchOptions,
        options.without("method", "formulation", "backend", "gap", "solver_option"),
    ],
    output: options.OutputOptions,
) -> None:
    """Explain the decisions of a schedule, or the cost of the decision on one tensor."""
    with live_line(enabled=not output.json, doing="verifying"):
        verified = read_valid_schedule(arguments.schedule, source, costing)
    print_warnings(verified.notes)
    explanation = summarize_decisions(verified, arguments.tensor)
    if arguments.tensor is not None:
        if verified.document.status != "optimal":
            print_warnings([NOT_PROVEN])
        with (
            live_line(enabled=not output.json, doing="solving without the decision"),
            suppress(KeyboardInterrupt),  # the decision is printed without its cost
        ):
            explanation = _with_costs(explanation, search)
    print_room_warnings(verified.room)
    if output.json:
        print_json(to_json_object(_explanation_facts(explanation)))
    elif arguments.tensor is not None:
        _print_tensor(explanation)
    else:
        _print_schedule(explanation)


def _print_tensor(explanation: DecisionSummary) -> None:
    """Print the tables of one tensor: its decision, and the costs of changes."""
    (decision,) = explanation.explained
    graph = explanation.stated.graph
    tensor = graph.tensors[decision.tensor]
    show(fact_table(f"{tensor.name} in {graph.name}", _decision_facts(explanation, decision)))
    changes = [_alternative_row(explanation, other) for other in explanation.alternatives]
    if explanation.ram_step is not None:
        changes.append(_ram_row(explanation, explanation.ram_step))
    if changes:
        print_text("")
        show(fact_table("What a change costs", changes))


def _alternative_row(explanation: DecisionSummary, other: Alternative) -> Fact:
    """Return the extra cost of a schedule without a decision, with its proof status."""
    name = f"without {other.forbidden}"
    if other.status == "infeasible":
        return text_fact(name, "impossible", "proven: no schedule does")
    lower_bound = -math.inf if other.least_extra is None else other.least_extra
    if other.extra is None:
        cost_text = (
            f"{_format_change(explanation, lower_bound)} or more"
            if lower_bound > explanation.noise
            else "unknown"
        )
        return text_fact(name, cost_text, "no schedule was found within the time limit")
    if other.proven or other.extra - lower_bound <= explanation.noise:
        text, proof = _format_change(explanation, other.extra), "proven"
    elif lower_bound > explanation.noise:
        text = (
            f"{_format_change(explanation, lower_bound)} to "
            f"{_format_change(explanation, other.extra)}"
        )
        proof = "no more is proven within the time limit"
    else:
        text = f"at most {_format_change(explanation, other.extra)}"
        proof = "not proven within the time limit"
    parts = [f"{other.becomes} instead"]
    if explanation.stated.problem.minimize != Quantity.TIME and other.extra_s:
        sign = "-" if other.extra_s < 0 else "+"
        parts.append(f"{sign}{format_seconds(abs(other.extra_s))}")
    return text_fact(name, text, "; ".join((*parts, proof)))


def _ram_row(explanation: DecisionSummary, step: RamStep) -> Fact:
    """Return the saving of the next larger RAM budget that helps, with its proof status."""
    problem = explanation.stated.problem
    budget = problem.ram_budget_bytes
    name = "with more RAM"
    if step.status == "infeasible":
        return text_fact(name, "saves nothing", "proven")
    min_useful_bytes = step.least_ram_bytes or 0
    less_text, found_text = (
        format_bytes((size or 0) - budget) for size in (min_useful_bytes, step.ram_bytes)
    )
    less_text = f"{min_useful_bytes - budget:,} B" if less_text == found_text else less_text
    no_gain_text = f"proven: less than {less_text} more saves nothing"
    if step.ram_bytes is None or step.saved is None:
        note = "no better schedule was found within the time limit"
        return text_fact(
            name, "unknown", f"{note}; {no_gain_text}" if min_useful_bytes > budget else note
        )
    if step.ram_bytes == budget:
        return text_fact(
            "with this RAM",
            _format_change(explanation, -step.saved),
            "the schedule is not the best",
        )
    proof = "the next step, proven" if step.proven else "found within the time limit"
    if not step.proven and min_useful_bytes > budget:
        proof = f"{proof}; {no_gain_text}"
    return text_fact(f"with {found_text} more RAM", _format_change(explanation, -step.saved), proof)


def _format_change(explanation: DecisionSummary, extra: float) -> str:
    """Format an extra amount of the minimized quantity with its sign; 0 within the tolerance."""
    format_value = explanation.stated.problem.objective.format
    if abs(extra) <= explanation.noise:
        return format_value(0.0)
    return f"{'-' if extra < 0 else '+'}{format_value(abs(extra))}"


def _decision_facts(explanation: DecisionSummary, decision: Decision) -> Iterator[Fact]:
    """Yield the decision on a tensor, its costs, and where the tensor is over time."""
    graph = explanation.stated.graph
    size = graph.tensor_bytes[decision.tensor]
    maker = graph.nodes[graph.node_of[decision.tensor]].name
    users = ", ".join(graph.nodes[k].name for k in graph.users_of[decision.tensor]) or "no node"
    yield text_fact("size", format_bytes(size), f"made by {maker}, read by {users}")
    yield text_fact("decision", str(decision.treatment), _action_text(decision))
    yield text_fact("costs", format_joules(decision.energy_j), format_seconds(decision.time_s))
    yield text_fact("in RAM", _spans_text(decision.in_ram), "stages")
    if decision.on_storage:
        yield text_fact("on storage", _spans_text(decision.on_storage), "stages")
    yield from _in_place_facts(explanation, decision)
    steps = decision.bytes_at_limit // size if size else 0
    yield text_fact(
        "at the limit",
        format_bytes(decision.bytes_at_limit),
        f"its size times {steps} of the {len(explanation.at_limit)} steps where RAM is at its "
        "limit, those with it in RAM",
    )


def _in_place_facts(explanation: DecisionSummary, decision: Decision) -> Iterator[Fact]:
    """Yield the tensors whose memory a tensor overwrites, and those that overwrite its memory."""
    graph, i = explanation.stated.graph, decision.tensor
    if i in graph.state_of:
        yield text_fact(
            "in place", "always", f"in the memory of {graph.tensors[graph.state_of[i]].name}"
        )
    for verb, node, other_field in (
        ("in the memory of", "output", "input"),
        ("its memory is taken by", "input", "output"),
    ):
        stages_by_tensor: dict[int, list[int]] = {}
        for use in explanation.in_place:
            if getattr(use, node) == i:
                stages_by_tensor.setdefault(getattr(use, other_field), []).append(use.stage)
        for other, stages in stages_by_tensor.items():
            yield text_fact("in place", _stages_text(stages), f"{verb} {graph.tensors[other].name}")


def _action_text(decision: Decision) -> str:
    """Return the stages in which a tensor is recomputed and paged, as text."""
    at_home = decision.treatment == "on storage"
    words = ("written back", "read") if at_home else ("paged out", "paged in")
    actions = (
        ("recomputed", decision.recomputed),
        (words[0], decision.paged_out),
        (words[1], decision.paged_in),
    )
    parts = [f"{action} in {_stages_text(stages)}" for action, stages in actions if stages]
    return "; ".join(reversed(parts) if at_home else parts)


def _stages_text(stages: Sequence[int]) -> str:
    return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"


def _spans_text(spans: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans) or "never"


def _print_schedule(explanation: DecisionSummary) -> None:
    """Print the table of the schedule and its most expensive decisions."""
    show(
        fact_table(f"Schedule for {explanation.stated.graph.name}", _explanation_facts(explanation))
    )
    if not explanation.groups:
        print_text("", "Nothing is recomputed or paged: all decisions are free.")
        return
    heads = ("tensor", "decision", "energy", "time")
    show("", listing("Most expensive decisions", heads, _decision_rows(explanation), left=2))
    print_text("'poetmodel explain SCHEDULE TENSOR' explains one tensor.")


def _explanation_facts(explanation: DecisionSummary) -> Iterator[Fact]:
    """Yield the facts about the schedule; those about single tensors are only in JSON."""
    verified = explanation.stated
    graph, simulation = verified.graph, verified.simulation
    overhead = f"overhead {format_joules(simulation.overhead_j or 0.0)}"
    counts = Counter(str(decision.treatment) for decision in explanation.decisions)
    yield Fact("graph", {"name": graph.name, "sha256": graph.sha256})
    yield Fact("status", verified.document.status)
    for group in (Group.ENERGY, Group.STEP, Group.WORK, Group.MEMORY, Group.STORAGE, Group.WEAR):
        yield from metric_facts(Display.EXPLAIN, simulation, group, notes={"energy_j": overhead})
    yield Fact("ram_budget_bytes", verified.problem.ram_budget_bytes)
    choices = ", ".join(f"{n} {choice}" for choice, n in counts.items())
    yield text_fact("tensors", f"{len(explanation.decisions)}", choices)
    yield _full_steps(explanation)
    yield from room_facts(verified.room)
    yield from state_facts(graph, simulation)
    yield from _in_place_summary(explanation)
    yield from constraint_facts(verified.constraints)
    full = [
        {"stage": point.stage, "node": graph.nodes[point.node].name, "ram_bytes": point.ram_bytes}
        for point in explanation.at_limit
    ]
    yield Fact("binding", full)
    yield Fact("tensors", [decision.to_dict(graph) for decision in explanation.decisions])
    explained = [decision.to_dict(graph) for decision in explanation.explained]
    if explanation.tensor is not None:
        explained[0]["alternatives"] = [other.to_dict() for other in explanation.alternatives]
    yield Fact("decisions", explained)
    groups = [
        {
            "name": group.name,
            "tensors": [graph.tensors[decision.tensor].name for decision in group.members],
            "fate": str(group.members[0].treatment),
            "energy_j": sum(decision.energy_j for decision in group.members),
            "time_s": sum(decision.time_s for decision in group.members),
        }
        for group in explanation.groups
    ]
    yield Fact("groups", groups)
    if explanation.tensor is not None:
        step = explanation.ram_step
        yield Fact("next_ram_step", None if step is None else step.to_dict())


def _in_place_summary(explanation: DecisionSummary) -> Iterator[Fact]:
    """Yield the number of operations in place, and the bytes that they save at the peak."""
    graph, uses, saved_bytes = (
        explanation.stated.graph,
        explanation.in_place,
        explanation.saved_in_place_bytes,
    )
    pairs = sum(map(len, graph.in_place_of))
    if pairs:
        values = {"uses": len(uses), "possible": pairs, "saved_at_peak_bytes": saved_bytes}
        n_overwriting = len({(use.output, use.input) for use in uses})
        text = f"{n_overwriting} of {plural(pairs, 'output')}"
        note = f"{plural(len(uses), 'time')}; saves {format_bytes(saved_bytes)} at the peak"
        yield Fact("in_place", values, "in place", lambda _: text, note)


def _full_steps(explanation: DecisionSummary) -> Fact:
    """Return the number of steps whose RAM is at its limit, with the fullest ones."""
    graph, points = explanation.stated.graph, explanation.at_limit
    fullest = sorted(points, key=lambda point: -point.ram_bytes)[:3]
    names = ", ".join(f"{graph.nodes[point.node].name} in stage {point.stage}" for point in fullest)
    total = len(explanation.stated.simulation.curve)
    return text_fact(
        "RAM at its limit",
        f"{len(points)} of {total} steps",
        f"fullest at {names}" if names else "",
    )


def _decision_rows(explanation: DecisionSummary) -> Iterator[tuple[str, ...]]:
    """Yield one table row for each of the most expensive decisions."""
    for group in explanation.groups:
        n_members, choice = len(group.members), group.members[0].treatment
        yield (
            group.name,
            f"{choice}" if n_members == 1 else f"{n_members} {choice}",
            format_joules(sum(decision.energy_j for decision in group.members)),
            format_seconds(sum(decision.time_s for decision in group.members)),
        )


# -- analysis ----------------------------------------------------------------------------------

MAX_DECISIONS: Final = 10
"""Maximum number of expensive decisions in the table."""
RAM_STEP_TIME_RATIO: Final = 0.4
"""Fraction of the time limit for finding the next RAM step."""
NOT_PROVEN: Final = (
    "the schedule is not proven optimal: a better schedule may account for the savings of another "
    "decision or of more RAM"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionSummary:
    """Decisions of a schedule, its full steps, and the costs of alternatives."""

    stated: VerifiedSchedule
    """The schedule and its problem."""
    decisions: Sequence[Decision]
    at_limit: Sequence[MemoryPoint]
    """Steps whose RAM is at its limit."""
    explained: Sequence[Decision]
    """Decision on the requested tensor, or the most expensive decisions first."""
    groups: Sequence[Fold[Decision]] = ()
    """Groups of equal decisions, most expensive first."""
    in_place: Sequence[InPlaceUse] = ()
    """Operations in place."""
    saved_in_place_bytes: int = 0
    """Bytes that operations in place save at the peak [B]."""
    tensor: int | None = None
    """Requested tensor; None for the whole schedule."""
    alternatives: Sequence[Alternative] = ()
    """Best schedules without a decision on that tensor."""
    ram_step: RamStep | None = None
    """Next larger RAM budget that helps; None if it was not computed."""

    @property
    def noise(self) -> float:
        """Largest difference of the minimized quantity that the gap tolerance can hide."""
        from poetmodel.solver.sensitivity.alternatives import GAP, MIN_GAIN_RATIO

        objective, simulation = self.stated.problem.objective, self.stated.simulation
        min_gain = MIN_GAIN_RATIO * abs(objective.value_of(simulation))
        return max(GAP * objective.overhead_of(simulation), min_gain)


def summarize_decisions(stated: VerifiedSchedule, tensor: str | None) -> DecisionSummary:
    """Explain the decision on one tensor, or the most expensive decisions if `tensor` is None."""
    from poetmodel.schedule.decisions import (
        find_decisions,
        in_place_uses,
        saved_in_place_bytes,
        steps_at_limit,
    )

    problem, schedule = stated.problem, stated.schedule
    at_limit = steps_at_limit(problem, schedule, stated.simulation)
    decisions = find_decisions(problem, schedule, at_limit)
    folds: Sequence[Fold[Decision]] = ()
    if tensor is None:
        most_expensive = _by_cost(decisions, problem.graph)
        explained = most_expensive[:MAX_DECISIONS]
        folds = _fold_decisions(most_expensive, problem.graph)
    else:
        explained = [decisions[_tensor_index(stated, tensor)]]
    return DecisionSummary(
        stated=stated,
        decisions=decisions,
        at_limit=at_limit,
        explained=explained,
        tensor=None if tensor is None else explained[0].tensor,
        groups=folds,
        in_place=in_place_uses(problem.graph, schedule),
        saved_in_place_bytes=saved_in_place_bytes(problem, schedule, stated.simulation),
    )


def _with_costs(explanation: DecisionSummary, search: options.SearchOptions) -> DecisionSummary:
    """Add the alternatives to the decision on a tensor, and the next RAM step, by solving."""
    from poetmodel.solver.sensitivity import find_alternatives, find_ram_step

    start_s = time.monotonic()
    problem, schedule = explanation.stated.problem, explanation.stated.schedule
    alternatives = find_alternatives(
        problem,
        schedule,
        explanation.explained[0].tensor,
        bound=explanation.stated.document.claims.get(OBJECTIVE_BOUND),
        time_limit=(1 - RAM_STEP_TIME_RATIO) * search.time_limit,
        threads=search.threads,
    )
    left_s = max(1.0, search.time_limit - (time.monotonic() - start_s))
    step = find_ram_step(problem, schedule, time_limit=left_s, threads=search.threads)
    return replace(explanation, alternatives=alternatives, ram_step=step)


def _by_cost(decisions: Sequence[Decision], graph: Graph) -> list[Decision]:
    """Return the decisions with a cost, most expensive first; one for each recomputed node."""
    size = graph.tensor_bytes
    with_cost = [decision for decision in decisions if decision.has_cost]
    decision_by_node: dict[tuple[object, ...], Decision] = {}
    for decision in sorted(
        with_cost, key=lambda candidate: (-candidate.energy_j, -size[candidate.tensor])
    ):
        is_recomputation_only = not decision.paged_in
        key = (
            is_recomputation_only,
            graph.node_of[decision.tensor] if is_recomputation_only else decision.tensor,
        )
        decision_by_node.setdefault(key, decision)
    return list(decision_by_node.values())


def _fold_decisions(decisions: Sequence[Decision], graph: Graph) -> list[Fold[Decision]]:
    """Fold equal decisions on tensors of equal blocks; return the most expensive groups."""
    folds = fold(
        decisions,
        name=lambda decision: graph.tensors[decision.tensor].name,
        key=lambda decision: (
            *(decision.treatment, graph.tensor_bytes[decision.tensor]),
            *(len(decision.recomputed), len(decision.paged_in), len(decision.paged_out)),
            *(f"{cost:.{DIGITS}g}" for cost in (decision.energy_j, decision.time_s)),
        ),
    )
    return sorted(folds, key=lambda folded: -sum(decision.energy_j for decision in folded.members))[
        :MAX_DECISIONS
    ]


def _tensor_index(stated: VerifiedSchedule, name: str) -> int:
    index = stated.graph.tensor_index
    if name not in index:
        hint = suggest_names(name, index, max_names=3)
        message = f"tensor {name!r}: graph {stated.graph.name!r} has no such tensor"
        raise InputError(f"{message}; {hint}" if hint else message)
    return index[name]
