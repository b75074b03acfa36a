"""What ``poetmodel explain`` finds out: decisions, where RAM is at its limit, and alternatives."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from poetmodel.device.room import room_figures
from poetmodel.errors import InputError
from poetmodel.problem import RELATIVE_TOLERANCE
from poetmodel.report.folding import DIGITS, fold
from poetmodel.report.presenter import constraint_facts, document, state_facts
from poetmodel.units import format_joules

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poetmodel.graph import Graph
    from poetmodel.report.folding import Fold
    from poetmodel.report.subject import VerifiedSchedule
    from poetmodel.schedule.decisions import Decision, InPlaceUse
    from poetmodel.schedule.simulation import MemoryPoint
    from poetmodel.solver.sensitivity.alternatives import Alternative, MoreRam

SHOWN: Final = 10
"""Number of most expensive decisions that are shown."""
RAM_SHARE: Final = 0.3
"""Part of the time limit for the value of more RAM."""
TENSOR_SHARE: Final = (1 - RAM_SHARE) / (2 * SHOWN)
"""Part of the time limit for a tensor, alone or among others, so that both give equal figures, and
for equal tensors together."""
DEFAULT_GAP: Final = 1e-4
"""Gap tolerance for schedules whose file states none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The explanation of a schedule."""

    stated: VerifiedSchedule
    """The schedule and its problem."""
    decisions: Sequence[Decision]
    at_limit: Sequence[MemoryPoint]
    """The steps at which RAM is at its limit."""
    asked: Sequence[tuple[Decision, Sequence[Alternative]]]
    """The tensors with their alternatives, the most expensive first."""
    more_ram: Sequence[MoreRam]
    groups: Sequence[tuple[Fold[Decision], Sequence[Alternative]]] = ()
    """Equal tensors with the alternatives for all of them, the most expensive first."""
    in_place: Sequence[InPlaceUse] = ()
    """Where it operates in place."""
    saved_in_place_bytes: int = 0
    """How much higher its peak is without [B]."""

    @property
    def noise_j(self) -> float:
        """Energies below this are within the gap tolerance of the schedule [J]."""
        simulation, stated = self.stated.simulation, self.stated.document.problem
        gap = DEFAULT_GAP if stated is None or stated.gap is None else stated.gap
        rounding_j = RELATIVE_TOLERANCE * (simulation.energy_j or 0.0)
        return gap * (simulation.overhead_j or 0.0) + rounding_j

    @property
    def least_possible_j(self) -> float:
        """The least cost of any alternative, by the bound of the file [J]; 0 or below."""
        stated, simulation = self.stated.document.stated, self.stated.simulation
        overhead_j, bound_j = simulation.overhead_j or 0.0, stated.get("overhead_bound_j")
        claimed_j = stated.get("overhead_j")
        if bound_j is None or claimed_j is None or abs(claimed_j - overhead_j) > self.noise_j:
            bound_j = 0.0  # no bound for these costs: every schedule pays the baseline
        return min(0.0, bound_j - overhead_j)

    def signed(self, energy_j: float) -> str:
        """Return an energy with its sign, 0 if it is within the gap."""
        if abs(energy_j) <= self.noise_j:
            return "0 J"
        return f"{'-' if energy_j < 0 else '+'}{format_joules(abs(energy_j))}"


def give_account(
    stated: VerifiedSchedule, tensor: str | None, *, each: bool, time_limit: float, threads: int
) -> Account:
    """Explain one tensor, or the most expensive ones and the value of more RAM.

    Equal tensors are explained together, and with `each` every one by itself too.
    """
    from poetmodel.schedule.decisions import (
        find_decisions,
        in_place_uses,
        saved_in_place_bytes,
        steps_at_limit,
    )
    from poetmodel.solver.sensitivity.alternatives import find_alternatives, value_of_ram

    problem, schedule = stated.problem, stated.schedule
    at_limit = steps_at_limit(problem, schedule, stated.simulation)
    decisions = find_decisions(problem, schedule, at_limit)
    more_ram: Sequence[MoreRam] = ()
    folds: Sequence[Fold[Decision]] = ()
    if tensor is None:
        dearest = _dearest(decisions, problem.graph)
        chosen = dearest[:SHOWN] if each else []
        folds = _folded(dearest, problem.graph)
        limit_s = RAM_SHARE * time_limit
        more_ram = value_of_ram(problem, schedule, time_limit=limit_s, threads=threads)
    else:
        chosen = [decisions[_number(stated, tensor)]]
    find = partial(find_alternatives, time_limit=TENSOR_SHARE * time_limit, threads=threads)
    asked = [(decision, find(problem, schedule, decision.tensor)) for decision in chosen]
    known = {decision.tensor: others for decision, others in asked}
    groups = []
    for one in folds:
        first, *twins = (decision.tensor for decision in one.members)
        others = None if twins else known.get(first)
        if others is None:
            others = find(problem, schedule, first, twins=twins)
        groups.append((one, others))
    return Account(
        stated=stated,
        decisions=decisions,
        at_limit=at_limit,
        asked=asked,
        more_ram=more_ram,
        groups=groups,
        in_place=in_place_uses(problem.graph, schedule),
        saved_in_place_bytes=saved_in_place_bytes(problem, schedule, stated.simulation),
    )


def _dearest(decisions: Sequence[Decision], graph: Graph) -> list[Decision]:
    """Return the most expensive decisions, a recomputation only for its largest output."""
    size = graph.tensor_bytes
    moved = [decision for decision in decisions if decision.has_cost]
    chosen: dict[tuple[object, ...], Decision] = {}
    for decision in sorted(moved, key=lambda one: (-one.energy_j, -size[one.tensor])):
        shared = not decision.paged_in
        key = (shared, graph.node_of[decision.tensor] if shared else decision.tensor)
        chosen.setdefault(key, decision)
    return list(chosen.values())


def _folded(decisions: Sequence[Decision], graph: Graph) -> list[Fold[Decision]]:
    """Fold equal decisions on tensors of equal blocks; return those that cost most together."""
    folds = fold(
        decisions,
        name=lambda one: graph.tensors[one.tensor].name,
        key=lambda one: (
            *(one.choice, graph.tensor_bytes[one.tensor]),
            *(len(one.recomputed), len(one.paged_in), len(one.paged_out)),
            *(f"{cost:.{DIGITS}g}" for cost in (one.energy_j, one.time_s)),
        ),
    )
    return sorted(folds, key=lambda each: -sum(one.energy_j for one in each.members))[:SHOWN]


def _number(stated: VerifiedSchedule, name: str) -> int:
    index = stated.graph.tensor_index
    if name not in index:
        from difflib import get_close_matches

        near = get_close_matches(name, index, n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise InputError(f"tensor {name!r}: graph {stated.graph.name!r} has no such tensor{hint}")
    return index[name]


def as_dict(account: Account) -> dict[str, Any]:
    """Return an explanation as plain values in SI units."""
    stated = account.stated
    graph, simulation = stated.graph, stated.simulation
    in_place = {
        "uses": len(account.in_place),
        "possible": sum(map(len, graph.in_place_of)),
        "saved_at_peak_bytes": account.saved_in_place_bytes,
    }
    return {
        "graph": {"name": graph.name, "sha256": graph.sha256},
        "status": stated.document.status,
        "energy_j": simulation.energy_j,
        "overhead_j": simulation.overhead_j,
        "time_s": simulation.time_s,
        "peak_ram_bytes": simulation.peak_ram_bytes,
        "ram_budget_bytes": stated.problem.ram_budget_bytes,
        **room_figures(stated.room),
        **document(state_facts(graph, simulation)),
        **({"in_place": in_place} if any(graph.in_place_of) else {}),
        **document(constraint_facts(stated.constraints)),
        "binding": [
            {"stage": at.stage, "node": graph.nodes[at.node].name, "ram_bytes": at.ram_bytes}
            for at in account.at_limit
        ],
        "tensors": [decision.to_dict(graph) for decision in account.decisions],
        "decisions": [
            decision.to_dict(graph) | {"alternatives": [other.to_dict() for other in others]}
            for decision, others in account.asked
        ],
        "groups": [
            {
                "name": each.name,
                "tensors": [graph.tensors[one.tensor].name for one in each.members],
                "fate": str(each.members[0].choice),
                "energy_j": sum(one.energy_j for one in each.members),
                "time_s": sum(one.time_s for one in each.members),
                "alternatives": [other.to_dict() for other in others],
            }
            for each, others in account.groups
        ],
        "more_ram": [more.to_dict() for more in account.more_ram],
    }
