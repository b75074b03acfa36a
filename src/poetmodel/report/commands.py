"""The commands that reproduce and verify a schedule."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.report.subject import Sources, Subject
    from poetmodel.schedule.io import ProblemEntry


def commands(subject: Subject) -> Iterator[str]:
    """Yield the commands that solve the problem of a schedule again and verify the schedule.

    For a compiled PyTorch step they are lines of Python.

    Parameters
    ----------
    subject : Subject
        The schedule. Without a stated problem or without costs it can only be verified.

    Yields
    ------
    str
        A line for a POSIX shell. Limits are written out with all digits.
    """
    if subject.step is not None:
        yield f"step = {subject.step['call']}\nprint(step.verify().summary())"
        return
    sources, stated = subject.sources, subject.document.problem
    device = sources.device if sources.device is not None else subject.document.device
    costs = [*_given("--device", device), *_given("--profile", sources.profile)]
    if stated is not None and subject.costs is not None:
        yield shlex.join(_solve(sources, stated, costs))
    verify = ["poetmodel", "verify", sources.schedule, "--graph", sources.graph]
    yield shlex.join([*verify, *sources.shape.options, *costs])


def _solve(sources: Sources, stated: ProblemEntry, costs: list[str]) -> list[str]:
    deadline = None if stated.deadline_s is None else f"{stated.deadline_s!r}s"
    energy = None if stated.energy_budget_j is None else f"{stated.energy_budget_j!r}J"
    switches = {
        "--no-recompute": not stated.recompute,
        "--no-paging": not stated.paging,
        "--count-parameters": stated.count_parameters,
    }
    return [
        *("poetmodel", "solve", sources.graph, *sources.shape.options, *costs),
        *_given("--ram", stated.ram_budget_bytes),
        *_given("--aux", stated.aux_bytes),
        *_given("--deadline", deadline),
        *_given("--deadline-counts", stated.deadline_counts),
        *_given("--minimize", None if stated.minimize == "energy" else stated.minimize),
        *_given("--energy-budget", energy),
        *(switch for switch, wanted in switches.items() if wanted),
        *_given("--method", None if stated.method == "optimal" else stated.method),
        *_given("--formulation", stated.formulation or None),
        *_given("--backend", stated.backend or None),
        *_given("--time-limit", stated.time_limit_s),
        *_given("--gap", stated.gap),
        *("--out", sources.schedule),
    ]


def _given(option: str, value: object) -> tuple[str, ...]:
    """Return an option with its value; nothing without a value."""
    return () if value is None else (option, f"{value}")
