"""Plan files as documents: a plan, its addresses, and the metrics that the file states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from poetmodel.plan.arena import Arena
from poetmodel.plan.io import load_file, parse_plan
from poetmodel.plan.program import Plan
from poetmodel.schedule.metrics import Display, metrics_at

if TYPE_CHECKING:
    from pathlib import Path

    from poetmodel.plan.io import PlanFile


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDocument:
    """A whole plan file: the plan, and the figures it states."""

    plan: Plan
    """The program, with the identity of its graph."""
    stated: dict[str, float | None]
    """The figures, by key."""
    arena: Arena | None = None
    """The addresses, where the file has them."""


def load_document(path: str | Path) -> PlanDocument:
    """Read a plan file; `PlanError` names every fault found."""
    return _document(load_file(path))


def parse_document(text: str, *, source: str) -> PlanDocument:
    """Read the text of a plan file; `source` names it in errors."""
    return _document(parse_plan(text, source=source))


def _document(file: PlanFile) -> PlanDocument:
    return PlanDocument(
        plan=Plan.of_file(file),
        stated={metric.key: getattr(file, metric.key) for metric in metrics_at(Display.PLAN_FILE)},
        arena=None if file.arena is None else Arena.of_entry(file.arena),
    )
