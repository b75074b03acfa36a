"""Plan files as documents: a plan, its arena, and the metrics that the file states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from poetmodel.plan.arena import Arena
from poetmodel.plan.io import load_file
from poetmodel.plan.program import Plan
from poetmodel.plan.simulation import false_claims
from poetmodel.schedule.identity import OLD_COSTS_NOTE, OTHER_COSTS
from poetmodel.schedule.metrics import Display, Group, metrics_at

if TYPE_CHECKING:
    from pathlib import Path

    from poetmodel.plan.check import PlanCheck


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDocument:
    """A parsed plan file: the plan, its arena, and the metrics that the file states."""

    plan: Plan
    """The program, with the identity of its graph."""
    stated_metrics: dict[str, float | None]
    """The stated metrics, by key; None for a metric that the file lacks."""
    arena: Arena | None = None
    """The arena; None if the file has none."""
    costs_sha256: str | None = None
    """Digest of the costs that the metrics were computed with; None if the file has none."""
    notes: tuple[str, ...] = ()
    """Notes on ignored keys of the file."""

    def check_claims(self, check: PlanCheck) -> tuple[list[str], list[str]]:
        """Compare the stated metrics with a simulation; return violations and notes.

        With costs that are not the file's, all differences but those of memory are notes.
        """
        memory_keys = {metric.key for metric in metrics_at(Display.PLAN_FILE, Group.MEMORY)}
        memory_claims, other_claims = (
            {
                key: value
                for key, value in self.stated_metrics.items()
                if (key in memory_keys) is is_memory
            }
            for is_memory in (True, False)
        )
        violations = list(false_claims(check, memory_claims))
        differences = list(false_claims(check, other_claims))
        if self.costs_sha256 is None:
            return violations + differences, [OLD_COSTS_NOTE] if differences else []
        if self.costs_sha256 == check.costs_sha256:
            return violations + differences, []
        return violations, [f"{OTHER_COSTS}: {difference}" for difference in differences]


def load_document(path: str | Path, content: bytes | None = None) -> PlanDocument:
    """Read a plan file, or its `content`; raise `PlanError` if that fails or it is invalid."""
    file = load_file(path, content)
    return PlanDocument(
        plan=Plan.from_file(file),
        stated_metrics={
            metric.key: getattr(file, metric.key) for metric in metrics_at(Display.PLAN_FILE)
        },
        arena=None if file.arena is None else Arena.from_entry(file.arena),
        costs_sha256=file.costs_sha256,
        notes=file.notes,
    )
