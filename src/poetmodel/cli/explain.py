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
from poetmodel.cli.failures import print_warnings
from poetmodel.cli.inputs import print_notes
from poetmodel.cli.output import fact_table, listing, live_line
from poetmodel.cli.reply import Reply
from poetmodel.errors import InputError, suggest_names
from poetmodel.problem import Quantity
from poetmodel.report.folding import DIGITS, Fold, fold
from poetmodel.report.presenter import (
    Fact,
    constraint_facts,
    device_ram_facts,
    format_items,
    metric_facts,
    state_facts,
    text_fact,
    to_json_object,
)
from poetmodel.schedule.identity import OBJECTIVE_BOUND
from poetmodel.schedule.metrics import Display, Group
from poetmodel.solver.request import SearchOptions
from poetmodel.units import format_bytes, format_joules, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.table import Table

    from poetmodel.case.opening import Checked
    from poetmodel.graph import Graph
    from poetmodel.schedule.decisions import Decision, InPlaceUse
    from poetmodel.schedule.simulation import MemoryPoint
    from poetmodel.solver.sensitivity import Alternative, RamStep


@options.group
class Arguments:
    """The schedule file and, optionally, one of its tensors."""

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
        SearchOptions,
        options.only("time_limit_s", "threads"),
    ],
    output: options.OutputOptions,
) -> Reply:
    """Explain the decisions of a schedule, or the cost of the decision on one tensor."""
    from poetmodel.case.opening import open_schedule

    with live_line(enabled=not output.json, activity="verifying"):
        opened = open_schedule(arguments.schedule, source.case(costing), is_input=True)
        verified = opened.require_valid().with_file_in_notes()
    print_notes(verified)
    summary = summarize_decisions(verified, arguments.tensor)
    if arguments.tensor is not None:
        if verified.document.status != "optimal":
            print_warnings([NOT_PROVEN])
        with (
            live_line(enabled=not output.json, activity="solving without the decision"),
            suppress(KeyboardInterrupt),  # Ctrl-C: the costs of changes are left out
        ):
            summary = _solve_for_alternatives(summary, search)
    lines = _schedule_lines if arguments.tensor is None else _tensor_lines
    return Reply(
        document=to_json_object(_explanation_facts(summary)),
        text=lines(summary),
        device_rams=(verified.device_ram,),
    )


def _tensor_lines(summary: DecisionSummary) -> Iterator[str | Table]:
    """Yield a table of the decision on one tensor, and a table of costs of changes, if known."""
    (decision,) = summary.main_decisions
    graph = summary.verified.graph
    tensor = graph.tensors[decision.tensor]
    yield fact_table(f"{tensor.name} in {graph.name}", _decision_facts(summary, decision))
    changes = [_alternative_fact(summary, alternative) for alternative in summary.alternatives]
    if summary.ram_step is not None:
        changes.append(_ram_step_fact(summary, summary.ram_step))
    if changes:
        yield ""
        yield fact_table("What a change costs", changes)


def _alternative_fact(summary: DecisionSummary, alternative: Alternative) -> Fact:
    """Return the extra cost of a schedule without a decision, with its proof status."""
    name = f"without {alternative.forbidden}"
    if alternative.status == "infeasible":
        return text_fact(name, "impossible", "proven: every schedule has this decision")
    lower_bound = -math.inf if alternative.min_extra is None else alternative.min_extra
    if alternative.extra is None:
        cost_text = (
            f"{_format_change(summary, lower_bound)} or more"
            if lower_bound > summary.tolerance
            else "unknown"
        )
        return text_fact(name, cost_text, "no schedule was found within the time limit")
    if alternative.proven or alternative.extra - lower_bound <= summary.tolerance:
        cost_text, proof = _format_change(summary, alternative.extra), "proven"
    elif lower_bound > summary.tolerance:
        cost_text = (
            f"{_format_change(summary, lower_bound)} to "
            f"{_format_change(summary, alternative.extra)}"
        )
        proof = "the range is not closed within the time limit"
    else:
        cost_text = f"at most {_format_change(summary, alternative.extra)}"
        proof = "not proven within the time limit"
    notes = [f"{alternative.becomes} instead"]
    if summary.verified.problem.minimize != Quantity.TIME and alternative.extra_s:
        sign = "-" if alternative.extra_s < 0 else "+"
        notes.append(f"{sign}{format_seconds(abs(alternative.extra_s))}")
    return text_fact(name, cost_text, "; ".join((*notes, proof)))


def _ram_step_fact(summary: DecisionSummary, ram_step: RamStep) -> Fact:
    """Return the saving of the smallest RAM budget with a better schedule, with its proof."""
    problem = summary.verified.problem
    budget = problem.ram_budget_bytes
    name = "with more RAM"
    if ram_step.status == "infeasible":
        return text_fact(name, "saves nothing", "proven")
    min_useful_bytes = ram_step.min_ram_bytes or 0
    useless_text, useful_text = (
        format_bytes((size or 0) - budget) for size in (min_useful_bytes, ram_step.ram_bytes)
    )
    useless_text = (
        f"{min_useful_bytes - budget:,} B" if useless_text == useful_text else useless_text
    )
    no_gain_text = f"proven: less than {useless_text} more saves nothing"
    if ram_step.ram_bytes is None or ram_step.saved is None:
        note = "no better schedule was found within the time limit"
        return text_fact(
            name, "unknown", f"{note}; {no_gain_text}" if min_useful_bytes > budget else note
        )
    if ram_step.ram_bytes == budget:
        return text_fact(
            "with this RAM",
            _format_change(summary, -ram_step.saved),
            "the schedule is not the best",
        )
    proof = "the next step, proven" if ram_step.proven else "found within the time limit"
    if not ram_step.proven and min_useful_bytes > budget:
        proof = f"{proof}; {no_gain_text}"
    return text_fact(
        f"with {useful_text} more RAM", _format_change(summary, -ram_step.saved), proof
    )


def _format_change(summary: DecisionSummary, amount: float) -> str:
    """Format a change of the minimized quantity with its sign; as 0 within the tolerance."""
    format_value = summary.verified.problem.objective.format
    if abs(amount) <= summary.tolerance:
        return format_value(0.0)
    return f"{'-' if amount < 0 else '+'}{format_value(abs(amount))}"


def _decision_facts(summary: DecisionSummary, decision: Decision) -> Iterator[Fact]:
    """Yield size, decision, costs, stages in RAM and on storage, and bytes in full steps."""
    graph = summary.verified.graph
    size = graph.tensor_bytes[decision.tensor]
    producer = graph.nodes[graph.node_of[decision.tensor]].name
    readers = ", ".join(graph.nodes[k].name for k in graph.users_of[decision.tensor]) or "no node"
    yield text_fact("size", format_bytes(size), f"made by {producer}, read by {readers}")
    yield text_fact("decision", str(decision.treatment), _action_text(decision))
    yield text_fact("costs", format_joules(decision.energy_j), format_seconds(decision.time_s))
    yield text_fact("in RAM", _spans_text(decision.in_ram), "stages")
    if decision.on_storage:
        yield text_fact("on storage", _spans_text(decision.on_storage), "stages")
    yield from _in_place_facts(summary, decision)
    n_full_steps = decision.bytes_at_limit // size if size else 0
    yield text_fact(
        "at the limit",
        format_bytes(decision.bytes_at_limit),
        f"its size times {n_full_steps}: it is in RAM in {n_full_steps} of the "
        f"{len(summary.full_steps)} steps where RAM is at its limit",
    )


def _in_place_facts(summary: DecisionSummary, decision: Decision) -> Iterator[Fact]:
    """Yield the tensors whose memory a tensor overwrites, and those that overwrite its memory."""
    graph, i = summary.verified.graph, decision.tensor
    if i in graph.state_of:
        yield text_fact(
            "in place", "always", f"in the memory of {graph.tensors[graph.state_of[i]].name}"
        )
    for phrase, own_field, other_field in (
        ("in the memory of", "output", "input"),
        ("its memory is overwritten by", "input", "output"),
    ):
        stages_by_tensor: dict[int, list[int]] = {}
        for use in summary.in_place_uses:
            if getattr(use, own_field) == i:
                stages_by_tensor.setdefault(getattr(use, other_field), []).append(use.stage)
        for other_tensor, stages in stages_by_tensor.items():
            yield text_fact(
                "in place", _stages_text(stages), f"{phrase} {graph.tensors[other_tensor].name}"
            )


def _action_text(decision: Decision) -> str:
    """Format actions with stages: ``recomputed in stage 7; paged out in stages 2, 3``."""
    is_on_storage = decision.treatment == "on storage"
    transfer_verbs = ("written back", "read") if is_on_storage else ("paged out", "paged in")
    actions = (
        ("recomputed", decision.recomputed),
        (transfer_verbs[0], decision.paged_out),
        (transfer_verbs[1], decision.paged_in),
    )
    texts = [f"{action} in {_stages_text(stages)}" for action, stages in actions if stages]
    return "; ".join(reversed(texts) if is_on_storage else texts)


def _stages_text(stages: Sequence[int]) -> str:
    return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"


def _spans_text(spans: Sequence[tuple[int, int]]) -> str:
    """Format ranges of stages, such as ``2-5, 7``; ``never`` if there are none."""
    return (
        ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in spans)
        or "never"
    )


def _schedule_lines(summary: DecisionSummary) -> Iterator[str | Table]:
    """Yield the table of a schedule, and that of its most expensive groups of decisions."""
    yield fact_table(f"Schedule for {summary.verified.graph.name}", _explanation_facts(summary))
    yield ""
    if not summary.groups:
        yield "No tensor is recomputed or paged: all decisions are free."
        return
    heads = ("tensor", "decision", "energy", "time")
    yield listing("Most expensive decisions", heads, _decision_rows(summary), n_text_columns=2)
    yield "'poetmodel explain SCHEDULE TENSOR' explains one tensor."


def _explanation_facts(summary: DecisionSummary) -> Iterator[Fact]:
    """Yield all facts for JSON, of which those with a name are in the table of a schedule."""
    verified = summary.verified
    graph, simulation = verified.graph, verified.simulation
    overhead = f"overhead {format_joules(simulation.overhead_j or 0.0)}"
    counts = Counter(str(decision.treatment) for decision in summary.decisions)
    yield Fact("graph", {"name": graph.name, "sha256": graph.sha256})
    yield Fact("status", verified.document.status)
    for group in (Group.ENERGY, Group.STEP, Group.WORK, Group.MEMORY, Group.STORAGE, Group.WEAR):
        yield from metric_facts(Display.EXPLAIN, simulation, group, notes={"energy_j": overhead})
    yield Fact("ram_budget_bytes", verified.problem.ram_budget_bytes)
    choices = ", ".join(f"{count} {choice}" for choice, count in counts.items())
    yield text_fact("tensors", f"{len(summary.decisions)}", choices)
    yield _steps_at_limit_fact(summary)
    yield from device_ram_facts(verified.device_ram)
    yield from state_facts(graph, simulation)
    yield from _in_place_total_facts(summary)
    yield from constraint_facts(verified.constraints)
    full_step_entries = [
        {"stage": point.stage, "node": graph.nodes[point.node].name, "ram_bytes": point.ram_bytes}
        for point in summary.full_steps
    ]
    yield Fact("binding", full_step_entries)
    yield Fact("tensors", [decision.to_dict(graph) for decision in summary.decisions])
    main_decisions = [decision.to_dict(graph) for decision in summary.main_decisions]
    if summary.tensor is not None:
        main_decisions[0]["alternatives"] = [
            alternative.to_dict() for alternative in summary.alternatives
        ]
    yield Fact("decisions", main_decisions)
    groups = [
        {
            "name": group.name,
            "tensors": [graph.tensors[decision.tensor].name for decision in group.members],
            "fate": str(group.members[0].treatment),
            "energy_j": sum(decision.energy_j for decision in group.members),
            "time_s": sum(decision.time_s for decision in group.members),
        }
        for group in summary.groups
    ]
    yield Fact("groups", groups)
    if summary.tensor is not None:
        step = summary.ram_step
        yield Fact("next_ram_step", None if step is None else step.to_dict())


def _in_place_total_facts(summary: DecisionSummary) -> Iterator[Fact]:
    """Yield the number of overwriting (output, input) pairs, and the peak RAM that they save."""
    graph, uses, saved_bytes = (
        summary.verified.graph,
        summary.in_place_uses,
        summary.saved_in_place_bytes,
    )
    n_pairs = sum(map(len, graph.in_place_of))
    if n_pairs:
        values = {"uses": len(uses), "possible": n_pairs, "saved_at_peak_bytes": saved_bytes}
        n_overwriting = len({(use.output, use.input) for use in uses})
        text = f"{n_overwriting} of {format_items(n_pairs, 'output')}"
        note = f"{format_items(len(uses), 'time')}; saves {format_bytes(saved_bytes)} at the peak"
        yield Fact("in_place", values, "in place", lambda _: text, note)


def _steps_at_limit_fact(summary: DecisionSummary) -> Fact:
    """Return a fact for the table: the number of full steps, and up to three with the most RAM."""
    graph, points = summary.verified.graph, summary.full_steps
    points_with_most_ram = sorted(points, key=lambda point: -point.ram_bytes)[:3]
    names = ", ".join(
        f"{graph.nodes[point.node].name} in stage {point.stage}" for point in points_with_most_ram
    )
    n_steps = len(summary.verified.simulation.curve)
    return text_fact(
        "RAM at its limit",
        f"{len(points)} of {n_steps} steps",
        f"most RAM at {names}" if names else "",
    )


def _decision_rows(summary: DecisionSummary) -> Iterator[tuple[str, ...]]:
    """Yield name, decision with the number of tensors, energy and time of each group."""
    for group in summary.groups:
        n_members, choice = len(group.members), group.members[0].treatment
        yield (
            group.name,
            f"{choice}" if n_members == 1 else f"{n_members} {choice}",
            format_joules(sum(decision.energy_j for decision in group.members)),
            format_seconds(sum(decision.time_s for decision in group.members)),
        )


# -- analysis ----------------------------------------------------------------------------------

MAX_DECISIONS: Final = 10
"""Maximum number of the most expensive decisions, and of their groups."""
RAM_STEP_TIME_FRACTION: Final = 0.4
"""Fraction of the time limit that the solves for alternatives leave to `find_ram_step`."""
NOT_PROVEN: Final = (
    "the schedule is not proven optimal: a better schedule may account for the savings of another "
    "decision or of more RAM"
)
"""Warning about the costs of alternatives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionSummary:
    """Decisions of a schedule, its full steps, and the costs of alternatives to one decision."""

    verified: Checked
    """The schedule and its problem."""
    decisions: Sequence[Decision]
    """The decision on each tensor, by index."""
    full_steps: Sequence[MemoryPoint]
    """Steps whose free RAM is too small for a cheaper decision; see `steps_at_limit`."""
    main_decisions: Sequence[Decision]
    """Only the decision on the requested tensor, or at most `MAX_DECISIONS` decisions with a cost,
    most expensive first."""
    groups: Sequence[Fold[Decision]] = ()
    """At most `MAX_DECISIONS` groups of equal decisions, most expensive first; empty if a tensor is
    requested, or if no decision has a cost."""
    in_place_uses: Sequence[InPlaceUse] = ()
    """Uses of in-place operators that overwrite an input."""
    saved_in_place_bytes: int = 0
    """Bytes that `in_place_uses` save at the peak [B]."""
    tensor: int | None = None
    """Index of the requested tensor; None for the whole schedule."""
    alternatives: Sequence[Alternative] = ()
    """Results of solves without each decision on that tensor; empty if not computed, or if no
    decision can be forbidden."""
    ram_step: RamStep | None = None
    """Result of the search for the smallest RAM budget with a better schedule; None if it was not
    computed, or if RAM is minimized."""

    @property
    def tolerance(self) -> float:
        """Largest change of the minimized quantity that counts as 0."""
        from poetmodel.solver.sensitivity.alternatives import GAP, MIN_GAIN_RATIO

        objective, simulation = self.verified.problem.objective, self.verified.simulation
        min_gain = MIN_GAIN_RATIO * abs(objective.value_of(simulation))
        return max(GAP * objective.overhead_of(simulation), min_gain)


def summarize_decisions(verified: Checked, tensor: str | None) -> DecisionSummary:
    """Summarize decisions, full steps, in-place uses; a given `tensor` is the main decision."""
    from poetmodel.schedule.decisions import (
        find_decisions,
        in_place_uses,
        saved_in_place_bytes,
        steps_at_limit,
    )

    problem, schedule = verified.problem, verified.schedule
    full_steps = steps_at_limit(problem, schedule, verified.simulation)
    decisions = find_decisions(problem, schedule, full_steps)
    folds: Sequence[Fold[Decision]] = ()
    if tensor is None:
        most_expensive = _sort_by_cost(decisions, problem.graph)
        main_decisions = most_expensive[:MAX_DECISIONS]
        folds = _fold_decisions(most_expensive, problem.graph)
    else:
        main_decisions = [decisions[_tensor_index(verified, tensor)]]
    return DecisionSummary(
        verified=verified,
        decisions=decisions,
        full_steps=full_steps,
        main_decisions=main_decisions,
        tensor=None if tensor is None else main_decisions[0].tensor,
        groups=folds,
        in_place_uses=in_place_uses(problem.graph, schedule),
        saved_in_place_bytes=saved_in_place_bytes(problem, schedule, verified.simulation),
    )


def _solve_for_alternatives(summary: DecisionSummary, search: SearchOptions) -> DecisionSummary:
    """Return a summary with `alternatives` of the first main decision, and with `ram_step`."""
    from poetmodel.solver.sensitivity import find_alternatives, find_ram_step

    start_s = time.monotonic()
    problem, schedule = summary.verified.problem, summary.verified.schedule
    alternatives = find_alternatives(
        problem,
        schedule,
        summary.main_decisions[0].tensor,
        bound=summary.verified.document.claims.get(OBJECTIVE_BOUND),
        time_limit=(1 - RAM_STEP_TIME_FRACTION) * search.time_limit_s,
        threads=search.threads,
    )
    remaining_s = max(1.0, search.time_limit_s - (time.monotonic() - start_s))
    ram_step = find_ram_step(problem, schedule, time_limit=remaining_s, threads=search.threads)
    return replace(summary, alternatives=alternatives, ram_step=ram_step)


def _sort_by_cost(decisions: Sequence[Decision], graph: Graph) -> list[Decision]:
    """Return the decisions with a cost (`has_cost`), highest energy first, then largest tensor."""
    sizes = graph.tensor_bytes
    costly_decisions = [decision for decision in decisions if decision.has_cost]
    decision_by_key: dict[tuple[object, ...], Decision] = {}
    for decision in sorted(
        costly_decisions, key=lambda candidate: (-candidate.energy_j, -sizes[candidate.tensor])
    ):
        is_recomputation_only = not (decision.paged_in or decision.paged_out)
        key = (
            is_recomputation_only,
            graph.node_of[decision.tensor] if is_recomputation_only else decision.tensor,
        )
        decision_by_key.setdefault(key, decision)
    return list(decision_by_key.values())


def _fold_decisions(decisions: Sequence[Decision], graph: Graph) -> list[Fold[Decision]]:
    """Fold tensors of equal size and decision; return the `MAX_DECISIONS` folds of most energy."""
    decision_folds = fold(
        decisions,
        name=lambda decision: graph.tensors[decision.tensor].name,
        key=lambda decision: (
            *(decision.treatment, graph.tensor_bytes[decision.tensor]),
            *(len(decision.recomputed), len(decision.paged_in), len(decision.paged_out)),
            *(f"{cost:.{DIGITS}g}" for cost in (decision.energy_j, decision.time_s)),
        ),
    )
    return sorted(
        decision_folds, key=lambda folded: -sum(decision.energy_j for decision in folded.members)
    )[:MAX_DECISIONS]


def _tensor_index(verified: Checked, name: str) -> int:
    index = verified.graph.tensor_index
    if name not in index:
        hint = suggest_names(name, index, max_names=3)
        message = f"tensor {name!r}: graph {verified.graph.name!r} has no such tensor"
        raise InputError(f"{message}; {hint}" if hint else message)
    return index[name]
