"""``poetmodel explain``: what a schedule decided, its full steps, and the cost of a decision."""

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
from poetmodel.cli.inputs import read_valid
from poetmodel.cli.output import figures, listing, live_line, print_json, print_text, show
from poetmodel.errors import InputError, did_you_mean
from poetmodel.problem import Quantity
from poetmodel.report.folding import DIGITS, Fold, fold
from poetmodel.report.presenter import (
    Fact,
    constraint_facts,
    document,
    metric_facts,
    plural,
    room_facts,
    row,
    state_facts,
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
    """The file, and one of its tensors."""

    schedule: Path = options.argument(
        options.REQUIRED, "SCHEDULE", "A schedule file, *.schedule.json."
    )
    tensor: str | None = options.argument(None, "TENSOR", "Explain this tensor alone, in full.")


@options.command("poetmodel explain mlp.json --graph mlp")
def explain(
    given: Arguments,
    source: options.FileGraphOptions,
    costing: options.CostOptions,
    search: Annotated[
        options.SearchOptions,
        options.without("method", "formulation", "backend", "gap", "solver_option"),
    ],
    output: options.OutputOptions,
) -> None:
    """Explain what a schedule decided for its tensors; of one tensor, what the decision costs."""
    with live_line(wanted=not output.json, doing="verifying"):
        stated = read_valid(given.schedule, source, costing)
    print_warnings(stated.notes)
    account = give_account(stated, given.tensor)
    if given.tensor is not None:
        if stated.document.status != "optimal":
            print_warnings([NOT_PROVEN])
        with (
            live_line(wanted=not output.json, doing="solving without the decision"),
            suppress(KeyboardInterrupt),  # the decision is known, and is printed
        ):
            account = _with_costs(account, search)
    print_room_warnings(stated.room)
    if output.json:
        print_json(document(_facts(account)))
    elif given.tensor is not None:
        _print_tensor(account)
    else:
        _print_schedule(account)


def _print_tensor(account: Account) -> None:
    (decision,) = account.asked
    graph = account.stated.graph
    tensor = graph.tensors[decision.tensor]
    show(figures(f"{tensor.name} in {graph.name}", _decision_facts(account, decision)))
    changes = [_alternative_row(account, other) for other in account.alternatives]
    if account.ram_step is not None:
        changes.append(_ram_row(account, account.ram_step))
    if changes:
        print_text("")
        show(figures("What a change costs", changes))


def _alternative_row(account: Account, other: Alternative) -> Fact:
    """Return what a schedule without a decision costs, and how that is known."""
    name = f"without {other.forbidden}"
    if other.status == "infeasible":
        return row(name, "impossible", "proven: no schedule does")
    least = -math.inf if other.least_extra is None else other.least_extra
    if other.extra is None:
        known = f"{_signed(account, least)} or more" if least > account.noise else "unknown"
        return row(name, known, "no schedule was found within the time limit")
    if other.proven or other.extra - least <= account.noise:
        text, proof = _signed(account, other.extra), "proven"
    elif least > account.noise:
        text = f"{_signed(account, least)} to {_signed(account, other.extra)}"
        proof = "no more is proven within the time limit"
    else:
        text = f"at most {_signed(account, other.extra)}"
        proof = "not proven within the time limit"
    parts = [f"{other.becomes} instead"]
    if account.stated.problem.minimize != Quantity.TIME and other.extra_s:
        sign = "-" if other.extra_s < 0 else "+"
        parts.append(f"{sign}{format_seconds(abs(other.extra_s))}")
    return row(name, text, "; ".join((*parts, proof)))


def _ram_row(account: Account, step: RamStep) -> Fact:
    """Return what the next step of RAM saves, and how that is known."""
    problem = account.stated.problem
    budget = problem.ram_budget_bytes
    name = "with more RAM"
    if step.status == "infeasible":
        return row(name, "saves nothing", "proven")
    least = step.least_ram_bytes or 0
    less, found = (format_bytes((size or 0) - budget) for size in (least, step.ram_bytes))
    less = f"{least - budget:,} B" if less == found else less
    closed = f"proven: less than {less} more saves nothing"
    if step.ram_bytes is None or step.saved is None:
        note = "no better schedule was found within the time limit"
        return row(name, "unknown", f"{note}; {closed}" if least > budget else note)
    if step.ram_bytes == budget:
        return row("with this RAM", _signed(account, -step.saved), "the schedule is not the best")
    proof = "the next step, proven" if step.proven else "found within the time limit"
    if not step.proven and least > budget:
        proof = f"{proof}; {closed}"
    return row(f"with {found} more RAM", _signed(account, -step.saved), proof)


def _signed(account: Account, extra: float) -> str:
    """Return an amount of the minimized quantity beyond that of the schedule, with its sign."""
    shown = account.stated.problem.objective.format
    if abs(extra) <= account.noise:
        return shown(0.0)
    return f"{'-' if extra < 0 else '+'}{shown(abs(extra))}"


def _decision_facts(account: Account, decision: Decision) -> Iterator[Fact]:
    graph = account.stated.graph
    size = graph.tensor_bytes[decision.tensor]
    maker = graph.nodes[graph.node_of[decision.tensor]].name
    users = ", ".join(graph.nodes[k].name for k in graph.users_of[decision.tensor]) or "no node"
    yield row("size", format_bytes(size), f"made by {maker}, read by {users}")
    yield row("decision", str(decision.choice), _deeds(decision))
    yield row("costs", format_joules(decision.energy_j), format_seconds(decision.time_s))
    yield row("in RAM", _spans(decision.in_ram), "stages")
    if decision.on_storage:
        yield row("on storage", _spans(decision.on_storage), "stages")
    yield from _taken_over(account, decision)
    steps = decision.bytes_at_limit // size if size else 0
    yield row(
        "at the limit",
        format_bytes(decision.bytes_at_limit),
        f"its size times {steps} of the {len(account.at_limit)} steps where RAM is at its limit, "
        "those with it in RAM",
    )


def _taken_over(account: Account, decision: Decision) -> Iterator[Fact]:
    """Yield in whose memory a tensor is written, and what is written in its own."""
    graph, i = account.stated.graph, decision.tensor
    if i in graph.state_of:
        yield row("in place", "always", f"in the memory of {graph.tensors[graph.state_of[i]].name}")
    for verb, node, others in (
        ("in the memory of", "output", "input"),
        ("its memory is taken by", "input", "output"),
    ):
        takers: dict[int, list[int]] = {}
        for use in account.in_place:
            if getattr(use, node) == i:
                takers.setdefault(getattr(use, others), []).append(use.stage)
        for other, stages in takers.items():
            yield row("in place", _at(stages), f"{verb} {graph.tensors[other].name}")


def _deeds(decision: Decision) -> str:
    at_home = decision.choice == "on storage"
    words = ("written back", "read") if at_home else ("paged out", "paged in")
    deeds = (
        ("recomputed", decision.recomputed),
        (words[0], decision.paged_out),
        (words[1], decision.paged_in),
    )
    parts = [f"{what} in {_at(stages)}" for what, stages in deeds if stages]
    return "; ".join(reversed(parts) if at_home else parts)


def _at(stages: Sequence[int]) -> str:
    return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"


def _spans(spans: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans) or "never"


def _print_schedule(account: Account) -> None:
    show(figures(f"Schedule for {account.stated.graph.name}", _facts(account)))
    if not account.groups:
        print_text("", "Nothing is recomputed or paged: no decision costs anything.")
        return
    heads = ("tensor", "decision", "energy", "time")
    show("", listing("Most expensive decisions", heads, _decisions(account), left=2))
    print_text("'poetmodel explain SCHEDULE TENSOR' explains one tensor.")


def _facts(account: Account) -> Iterator[Fact]:
    """Yield what is known of the schedule; people read of single tensors elsewhere."""
    stated = account.stated
    graph, simulation = stated.graph, stated.simulation
    overhead = f"overhead {format_joules(simulation.overhead_j or 0.0)}"
    counts = Counter(str(decision.choice) for decision in account.decisions)
    yield Fact("graph", {"name": graph.name, "sha256": graph.sha256})
    yield Fact("status", stated.document.status)
    for group in (Group.ENERGY, Group.STEP, Group.WORK, Group.MEMORY, Group.STORAGE, Group.WEAR):
        yield from metric_facts(Display.EXPLAIN, simulation, group, notes={"energy_j": overhead})
    yield Fact("ram_budget_bytes", stated.problem.ram_budget_bytes)
    choices = ", ".join(f"{n} {choice}" for choice, n in counts.items())
    yield row("tensors", f"{len(account.decisions)}", choices)
    yield _at_limit(account)
    yield from room_facts(stated.room)
    yield from state_facts(graph, simulation)
    yield from _in_place(account)
    yield from constraint_facts(stated.constraints)
    full = [
        {"stage": at.stage, "node": graph.nodes[at.node].name, "ram_bytes": at.ram_bytes}
        for at in account.at_limit
    ]
    yield Fact("binding", full)
    yield Fact("tensors", [decision.to_dict(graph) for decision in account.decisions])
    asked = [decision.to_dict(graph) for decision in account.asked]
    if account.tensor is not None:
        asked[0]["alternatives"] = [other.to_dict() for other in account.alternatives]
    yield Fact("decisions", asked)
    groups = [
        {
            "name": group.name,
            "tensors": [graph.tensors[decision.tensor].name for decision in group.members],
            "fate": str(group.members[0].choice),
            "energy_j": sum(decision.energy_j for decision in group.members),
            "time_s": sum(decision.time_s for decision in group.members),
        }
        for group in account.groups
    ]
    yield Fact("groups", groups)
    if account.tensor is not None:
        step = account.ram_step
        yield Fact("next_ram_step", None if step is None else step.to_dict())


def _in_place(account: Account) -> Iterator[Fact]:
    """Yield where the schedule operates in place, and what that saves."""
    graph, uses, saved_bytes = account.stated.graph, account.in_place, account.saved_in_place_bytes
    pairs = sum(map(len, graph.in_place_of))
    if pairs:
        values = {"uses": len(uses), "possible": pairs, "saved_at_peak_bytes": saved_bytes}
        done = len({(use.output, use.input) for use in uses})
        text = f"{done} of {plural(pairs, 'output')}"
        note = f"{plural(len(uses), 'time')}; saves {format_bytes(saved_bytes)} at the peak"
        yield Fact("in_place", values, "in place", lambda _: text, note)


def _at_limit(account: Account) -> Fact:
    graph, points = account.stated.graph, account.at_limit
    fullest = sorted(points, key=lambda point: -point.ram_bytes)[:3]
    names = ", ".join(f"{graph.nodes[point.node].name} in stage {point.stage}" for point in fullest)
    total = len(account.stated.simulation.curve)
    return row(
        "RAM at its limit",
        f"{len(points)} of {total} steps",
        f"fullest at {names}" if names else "",
    )


def _decisions(account: Account) -> Iterator[tuple[str, ...]]:
    """Yield the most expensive decisions."""
    for group in account.groups:
        many, choice = len(group.members), group.members[0].choice
        yield (
            group.name,
            f"{choice}" if many == 1 else f"{many} {choice}",
            format_joules(sum(decision.energy_j for decision in group.members)),
            format_seconds(sum(decision.time_s for decision in group.members)),
        )


# -- what it finds out -------------------------------------------------------------------------

SHOWN: Final = 10
"""Number of most expensive decisions that are shown."""
RAM_STEP_SHARE: Final = 0.4
"""Share of the time limit to find the next step of RAM."""
NOT_PROVEN: Final = (
    "the schedule is not proven optimal: a better one may save what another decision or more RAM "
    "seems to save"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The explanation of a schedule."""

    stated: VerifiedSchedule
    """The schedule and its problem."""
    decisions: Sequence[Decision]
    at_limit: Sequence[MemoryPoint]
    """The steps at which RAM is at its limit."""
    asked: Sequence[Decision]
    """The one of a tensor, or the most expensive ones, these first."""
    groups: Sequence[Fold[Decision]] = ()
    """Equal ones, the most expensive first."""
    in_place: Sequence[InPlaceUse] = ()
    """Where it operates in place."""
    saved_in_place_bytes: int = 0
    """How much higher its peak is without [B]."""
    tensor: int | None = None
    """The tensor that is explained alone."""
    alternatives: Sequence[Alternative] = ()
    """What the decision on that tensor costs."""
    ram_step: RamStep | None = None
    """What more RAM saves, if that was solved."""

    @property
    def noise(self) -> float:
        """The largest amount of the minimized quantity that the gap tolerance hides."""
        from poetmodel.solver.sensitivity.alternatives import GAP, LEAST_GAIN

        objective, simulation = self.stated.problem.objective, self.stated.simulation
        whole = LEAST_GAIN * abs(objective.value_of(simulation))
        return max(GAP * objective.overhead_of(simulation), whole)


def give_account(stated: VerifiedSchedule, tensor: str | None) -> Account:
    """Explain one tensor, or the most expensive ones."""
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
        dearest = _dearest(decisions, problem.graph)
        asked = dearest[:SHOWN]
        folds = _folded(dearest, problem.graph)
    else:
        asked = [decisions[_number(stated, tensor)]]
    return Account(
        stated=stated,
        decisions=decisions,
        at_limit=at_limit,
        asked=asked,
        tensor=None if tensor is None else asked[0].tensor,
        groups=folds,
        in_place=in_place_uses(problem.graph, schedule),
        saved_in_place_bytes=saved_in_place_bytes(problem, schedule, stated.simulation),
    )


def _with_costs(account: Account, search: options.SearchOptions) -> Account:
    """Return the account of a tensor with the cost of its decision and the next step of RAM."""
    from poetmodel.solver.sensitivity import find_alternatives, find_ram_step

    begun_s = time.monotonic()
    problem, schedule = account.stated.problem, account.stated.schedule
    alternatives = find_alternatives(
        problem,
        schedule,
        account.asked[0].tensor,
        bound=account.stated.document.claims.get(OBJECTIVE_BOUND),
        time_limit=(1 - RAM_STEP_SHARE) * search.time_limit,
        threads=search.threads,
    )
    left_s = max(1.0, search.time_limit - (time.monotonic() - begun_s))
    step = find_ram_step(problem, schedule, time_limit=left_s, threads=search.threads)
    return replace(account, alternatives=alternatives, ram_step=step)


def _dearest(decisions: Sequence[Decision], graph: Graph) -> list[Decision]:
    """Return the most expensive decisions, a recomputation only for its largest output."""
    size = graph.tensor_bytes
    moved = [decision for decision in decisions if decision.has_cost]
    chosen: dict[tuple[object, ...], Decision] = {}
    for decision in sorted(
        moved, key=lambda candidate: (-candidate.energy_j, -size[candidate.tensor])
    ):
        shared = not decision.paged_in
        key = (shared, graph.node_of[decision.tensor] if shared else decision.tensor)
        chosen.setdefault(key, decision)
    return list(chosen.values())


def _folded(decisions: Sequence[Decision], graph: Graph) -> list[Fold[Decision]]:
    """Fold equal decisions on tensors of equal blocks; return those that cost most together."""
    folds = fold(
        decisions,
        name=lambda decision: graph.tensors[decision.tensor].name,
        key=lambda decision: (
            *(decision.choice, graph.tensor_bytes[decision.tensor]),
            *(len(decision.recomputed), len(decision.paged_in), len(decision.paged_out)),
            *(f"{cost:.{DIGITS}g}" for cost in (decision.energy_j, decision.time_s)),
        ),
    )
    return sorted(folds, key=lambda folded: -sum(decision.energy_j for decision in folded.members))[
        :SHOWN
    ]


def _number(stated: VerifiedSchedule, name: str) -> int:
    index = stated.graph.tensor_index
    if name not in index:
        hint = did_you_mean(name, index, max_names=3)
        lacks = f"tensor {name!r}: graph {stated.graph.name!r} has no such tensor"
        raise InputError(f"{lacks}; {hint}" if hint else lacks)
    return index[name]
