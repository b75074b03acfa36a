"""``poetmodel diff``: compare two schedules of one graph and list their different decisions."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from poetmodel.cli import options
from poetmodel.cli.failures import print_room_warnings, print_warnings
from poetmodel.cli.inputs import read_valid_schedule
from poetmodel.cli.output import listing, live_line, print_json, print_text, show
from poetmodel.report.presenter import (
    Fact,
    constraint_rows,
    metric_facts,
    plural,
    room_facts,
    state_figures,
    to_json_object,
)
from poetmodel.schedule.metrics import Display, Group
from poetmodel.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from poetmodel.graph import Graph
    from poetmodel.report.subject import VerifiedSchedule
    from poetmodel.schedule.decisions import Decision

MAX_TENSORS: Final = 40
"""Maximum number of tensors in the table; JSON contains all."""


@options.group
class FileArguments:
    """The two schedule files."""

    a: Path = options.argument(options.REQUIRED, "A", "A schedule file.")
    b: Path = options.argument(options.REQUIRED, "B", "Another schedule file of the same graph.")


@options.command("poetmodel diff mlp.json mlp.json --graph mlp")
def diff(
    files: FileArguments,
    source: options.FileGraphOptions,
    costing: options.CostOptions,
    output: options.OutputOptions,
) -> None:
    """Compare two schedules of one graph, for different budgets, devices or methods."""
    from poetmodel.schedule.decisions import find_decisions

    paths = (files.a, files.b)
    with live_line(enabled=not output.json, doing="verifying"):
        sides = [read_valid_schedule(path, source, costing) for path in paths]
    print_warnings(dict.fromkeys(note for side in sides for note in side.notes))
    graph = sides[0].graph
    decisions = zip(*(find_decisions(side.problem, side.schedule) for side in sides), strict=True)
    changed_pairs = [
        (decision, other)
        for decision, other in decisions
        if _decision_key(decision) != _decision_key(other)
    ]
    print_room_warnings(*(side.room for side in sides))
    facts = [list(_schedule_facts(side)) for side in sides]
    if output.json:
        print_json(
            {
                "graph": {"name": graph.name, "sha256": graph.sha256},
                "schedules": [
                    {"file": str(path)} | to_json_object(side)
                    for path, side in zip(paths, facts, strict=True)
                ],
                "changed": [
                    {
                        "tensor": graph.tensors[decision.tensor].name,
                        "bytes": graph.tensor_bytes[decision.tensor],
                        "a": _side(decision, graph),
                        "b": _side(other, graph),
                    }
                    for decision, other in changed_pairs
                ],
            }
        )
        return
    names = [path.name if files.a.name != files.b.name else str(path) for path in paths]
    lines = [_line(*pair) for pair in zip(*facts, strict=True) if pair[0].name is not None]
    lines += [_line(*pair) for pair in constraint_rows([side.constraints for side in sides])]
    show(listing(f"Schedules for {graph.name}", ("", *names, "change"), lines))
    _print_changed(graph, names, changed_pairs)


def _side(decision: Decision, graph: Graph) -> dict[str, Any]:
    values = decision.to_dict(graph)
    kept = ("fate", "recomputed", "paged_out", "paged_in", "energy_j", "time_s")
    return {key: values[key] for key in kept}


def _schedule_facts(side: VerifiedSchedule) -> Iterator[Fact]:
    """Yield the facts about one schedule that the table compares."""
    simulation, problem = side.verdict.simulation, side.problem
    stated_problem = side.document.problem
    yield Fact("device", side.document.device, "device")
    yield Fact("method", None if stated_problem is None else stated_problem.method, "method")
    yield Fact("status", side.document.status, "status")
    yield Fact("ram_budget_bytes", problem.ram_budget_bytes, "RAM budget", format_bytes)
    yield Fact("deadline_s", problem.deadline_s, "deadline", format_seconds)
    group_facts = partial(metric_facts, Display.DIFF, simulation)
    for group in (Group.ENERGY, Group.STEP, Group.WORK, Group.MEMORY):
        yield from group_facts(group)
    room = to_json_object(room_facts(side.room))
    yield Fact("resident_bytes", room["resident_bytes"])
    yield Fact("device_ram_bytes", room["device_ram_bytes"], "device RAM", format_bytes)
    yield Fact("fits_device", room["fits_device"], "fits device", _yes_or_no)
    yield Fact("device_ram", room["device_ram"])
    state = state_figures(side.graph, simulation)
    if state is not None:
        yield Fact("state", state)
        yield Fact("", state["resident_bytes"], "resident state", format_bytes)
        yield Fact("", state["on_storage_bytes"], "state on storage", format_bytes)
    yield from group_facts(Group.STORAGE)
    yield from group_facts(Group.WEAR)
    n_recomputations = sum(k < t for t, k in side.schedule.R)
    yield Fact("recomputations", n_recomputations, "recomputations")
    yield Fact("constraints", [constraint.to_dict() for constraint in side.constraints])


def _line(left: Fact, right: Fact) -> tuple[str, str, str, str]:
    """Return a row of the table: name, value of each schedule, and difference of numbers."""
    unknown = "" if left.unit is _yes_or_no else "none"
    difference = ""
    are_numbers = all(
        isinstance(fact.value, int | float) and not isinstance(fact.value, bool)
        for fact in (left, right)
    )
    if are_numbers and left.value != right.value:
        sign = "-" if right.value < left.value else "+"
        difference = f"{sign}{left.unit(abs(right.value - left.value))}"
    return left.name or "", left.text or unknown, right.text or unknown, difference


def _yes_or_no(fits: object) -> str:
    return "yes" if fits else "NO"


def _decision_key(decision: Decision) -> tuple[object, ...]:
    """Return the decision on a tensor, and the stages of its recomputations and transfers.

    These determine when the tensor is in RAM. The decision has the home of state without transfers.
    """
    return decision.treatment, decision.recomputed, decision.paged_out, decision.paged_in


def _print_changed(
    graph: Graph, names: Sequence[str], changed: Sequence[tuple[Decision, Decision]]
) -> None:
    """Print the tensors with different decisions, largest first."""
    if not changed:
        print_text("Both schedules decide the same for every tensor.")
        return
    size = graph.tensor_bytes
    lines = [
        (
            graph.tensors[decision.tensor].name,
            *_decision_texts(decision, other),
            format_bytes(size[decision.tensor]),
        )
        for decision, other in sorted(changed, key=lambda pair: -size[pair[0].tensor])[:MAX_TENSORS]
    ]
    title = f"Different decisions: {plural(len(changed), 'tensor')}"
    show(listing(title, ("tensor", *names, "bytes"), lines, left=3))
    if len(changed) > MAX_TENSORS:
        print_text(f"and {len(changed) - MAX_TENSORS} more; --json has them all")


def _decision_texts(*decisions: Decision) -> tuple[str, ...]:
    """Return the decision of each schedule on a tensor, with the stages if decisions are equal."""
    stages = [sorted((*decision.recomputed, *decision.paged_in)) for decision in decisions]
    texts = tuple(
        f"{decision.treatment} x{len(stages_of_decision)}"
        if len(stages_of_decision) > 1
        else str(decision.treatment)
        for decision, stages_of_decision in zip(decisions, stages, strict=True)
    )
    if len(set(texts)) > 1:
        return texts
    both = zip(texts, stages, strict=True)
    return tuple(
        f"{word} at {','.join(map(str, stages_of_decision))}" for word, stages_of_decision in both
    )
