"""``poetmodel diff``: compare two schedules of one graph and list their different decisions."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from poetmodel.cli import options
from poetmodel.cli.inputs import print_notes
from poetmodel.cli.output import listing, live_line
from poetmodel.cli.reply import Reply
from poetmodel.errors import InputError
from poetmodel.report.presenter import (
    Fact,
    constraint_rows,
    device_ram_facts,
    format_items,
    metric_facts,
    state_metrics,
    to_json_object,
)
from poetmodel.schedule.metrics import Display, Group
from poetmodel.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.table import Table

    from poetmodel.case.opening import Checked
    from poetmodel.graph import Graph
    from poetmodel.schedule.decisions import Decision

MAX_TENSORS: Final = 40
"""Maximum number of tensors in the table; JSON contains all."""


@options.group
class FileArguments:
    """The two schedule files."""

    first: Path = options.argument(options.REQUIRED, "A", "A schedule file.")
    second: Path = options.argument(
        options.REQUIRED, "B", "Another schedule file of the same graph."
    )


@options.command("poetmodel diff mlp.json mlp.json --graph mlp")
def diff(
    files: FileArguments,
    source: options.FileGraphOptions,
    costing: options.CostOptions,
    output: options.OutputOptions,
) -> Reply:
    """Compare two schedules of one graph, for different budgets, devices or methods."""
    from poetmodel.case.opening import open_schedule
    from poetmodel.schedule.decisions import find_decisions

    paths = (files.first, files.second)
    with live_line(enabled=not output.json, activity="verifying"):
        case = source.case(costing)
        verified_schedules = [
            open_schedule(path, case, is_input=True).require_valid().with_file_in_notes()
            for path in paths
        ]
    print_notes(*verified_schedules)
    graph, other_graph = (verified.graph for verified in verified_schedules)
    if graph.sha256 != other_graph.sha256:
        raise InputError(
            f"{files.second}: a schedule of another graph than {files.first}: {other_graph.name} "
            f"and {graph.name} differ; give two schedules of one graph"
        )
    decisions = zip(
        *(find_decisions(verified.problem, verified.schedule) for verified in verified_schedules),
        strict=True,
    )
    changed_pairs = [
        (decision, second_decision)
        for decision, second_decision in decisions
        if _decision_key(decision) != _decision_key(second_decision)
    ]
    facts = [list(_compared_facts(verified)) for verified in verified_schedules]
    document = {
        "graph": {"name": graph.name, "sha256": graph.sha256},
        "schedules": [
            {"file": str(path)} | to_json_object(verified)
            for path, verified in zip(paths, facts, strict=True)
        ],
        "changed": [
            {
                "tensor": graph.tensors[decision.tensor].name,
                "bytes": graph.tensor_bytes[decision.tensor],
                "a": _decision_values(decision, graph),
                "b": _decision_values(second_decision, graph),
            }
            for decision, second_decision in changed_pairs
        ],
    }
    names = [path.name if files.first.name != files.second.name else str(path) for path in paths]
    lines = [_table_row(*pair) for pair in zip(*facts, strict=True) if pair[0].name is not None]
    lines += [
        _table_row(*pair)
        for pair in constraint_rows([verified.constraints for verified in verified_schedules])
    ]
    return Reply(
        document=document,
        text=(
            listing(f"Schedules for {graph.name}", ("", *names, "change"), lines),
            *_changed_decision_lines(graph, names, changed_pairs),
        ),
        device_rams=[verified.device_ram for verified in verified_schedules],
    )


def _decision_values(decision: Decision, graph: Graph) -> dict[str, Any]:
    values = decision.to_dict(graph)
    keys = ("fate", "recomputed", "paged_out", "paged_in", "energy_j", "time_s")
    return {key: values[key] for key in keys}


def _compared_facts(verified: Checked) -> Iterator[Fact]:
    """Yield the facts about a schedule, in the same number and order for schedules of one graph."""
    simulation, problem = verified.verdict.simulation, verified.problem
    stated_problem = verified.document.problem
    yield Fact("device", verified.document.device, "device")
    yield Fact("method", None if stated_problem is None else stated_problem.method, "method")
    yield Fact("status", verified.document.status, "status")
    yield Fact("ram_budget_bytes", problem.ram_budget_bytes, "RAM budget", format_bytes)
    yield Fact("deadline_s", problem.deadline_s, "deadline", format_seconds)
    group_facts = partial(metric_facts, Display.DIFF, simulation)
    for group in (Group.ENERGY, Group.STEP, Group.WORK, Group.MEMORY):
        yield from group_facts(group)
    ram_values = to_json_object(device_ram_facts(verified.device_ram))
    yield Fact("resident_bytes", ram_values["resident_bytes"])
    yield Fact("device_ram_bytes", ram_values["device_ram_bytes"], "device RAM", format_bytes)
    yield Fact("fits_device", ram_values["fits_device"], "fits device", _format_fit)
    yield Fact("device_ram", ram_values["device_ram"])
    state = state_metrics(verified.graph, simulation)
    if state is not None:
        yield Fact("state", state)
        yield Fact("", state["resident_bytes"], "resident state", format_bytes)
        yield Fact("", state["on_storage_bytes"], "state on storage", format_bytes)
    yield from group_facts(Group.STORAGE)
    yield from group_facts(Group.WEAR)
    n_recomputations = sum(k < t for t, k in verified.schedule.R)
    yield Fact("recomputations", n_recomputations, "recomputations")
    yield Fact("constraints", [constraint.to_dict() for constraint in verified.constraints])


def _table_row(first: Fact, second: Fact) -> tuple[str, str, str, str]:
    """Return a row of the table: name, value of each schedule, and second minus first value."""
    unknown_text = "" if first.format_value is _format_fit else "none"
    difference = ""
    are_numbers = all(
        isinstance(fact.value, int | float) and not isinstance(fact.value, bool)
        for fact in (first, second)
    )
    if are_numbers and first.value != second.value:
        sign = "-" if second.value < first.value else "+"
        difference = f"{sign}{first.format_value(abs(second.value - first.value))}"
    return first.name or "", first.text or unknown_text, second.text or unknown_text, difference


def _format_fit(value: object) -> str:
    return "yes" if value else "NO"


def _decision_key(decision: Decision) -> tuple[object, ...]:
    """Return the treatment of a tensor, and the stages of its recomputations and transfers."""
    return decision.treatment, decision.recomputed, decision.paged_out, decision.paged_in


def _changed_decision_lines(
    graph: Graph, names: Sequence[str], changed_pairs: Sequence[tuple[Decision, Decision]]
) -> Iterator[str | Table]:
    """Yield a table of the largest tensors of `changed_pairs`, or that no decision differs."""
    if not changed_pairs:
        yield "The schedules have the same decisions for all tensors."
        return
    sizes = graph.tensor_bytes
    lines = [
        (
            graph.tensors[decision.tensor].name,
            *_decision_texts(decision, second_decision),
            format_bytes(sizes[decision.tensor]),
        )
        for decision, second_decision in sorted(
            changed_pairs, key=lambda pair: -sizes[pair[0].tensor]
        )[:MAX_TENSORS]
    ]
    title = f"Different decisions: {format_items(len(changed_pairs), 'tensor')}"
    yield listing(title, ("tensor", *names, "bytes"), lines, n_text_columns=3)
    if len(changed_pairs) > MAX_TENSORS:
        yield (f"and {len(changed_pairs) - MAX_TENSORS} more; --json lists all")


def _decision_texts(*decisions: Decision) -> tuple[str, ...]:
    """Return each decision as text: ``paged x2`` for two restorations; if equal, with stages."""
    restoration_stages = [
        sorted((*decision.recomputed, *decision.paged_in)) for decision in decisions
    ]
    page_out_stages = [sorted(decision.paged_out) for decision in decisions]
    texts = tuple(
        f"{decision.treatment} x{len(stages_of_decision)}"
        if len(stages_of_decision) > 1
        else str(decision.treatment)
        for decision, stages_of_decision in zip(decisions, restoration_stages, strict=True)
    )
    if len(set(texts)) > 1:
        return texts
    recomputation_stages = [sorted(decision.recomputed) for decision in decisions]
    for verb, stages in (
        ("at", restoration_stages),
        ("out at", page_out_stages),
        ("recomputed at", recomputation_stages),
    ):
        if len(set(map(tuple, stages))) > 1:
            return tuple(
                f"{text} {verb} {','.join(map(str, stages_of_decision)) or 'no stage'}"
                for text, stages_of_decision in zip(texts, stages, strict=True)
            )
    return texts
