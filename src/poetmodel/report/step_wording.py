"""The words of a report on a compiled PyTorch step: three answers and rows of figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from poetmodel.report.wording import Answer, Figure, figure_parts, look_up, share, whole_bytes
from poetmodel.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from poetmodel.report.wording import Row

    Facts = Mapping[str, Any]

REMEDY: Final = "call step.verify(x, y), then write this page again"
"""What to do if a step was not compared with eager PyTorch."""


def step_answers(step: Facts) -> tuple[Answer, Answer, Answer]:
    """Return whether a step equals eager PyTorch, keeps its budget, and how long it takes."""
    return _sameness(step), _memory(step), _speed(step)


def measured_rows(step: Facts) -> Iterator[tuple[str, tuple[tuple[str, Any, str] | None, ...]]]:
    """Yield rows of figures: measured, planned, and of eager PyTorch.

    Parameters
    ----------
    step : mapping
        The facts of the step.

    Yields
    ------
    tuple
        The name of a row; for each column key, value and text, or None.
    """
    for name, form, keys in _MEASURED:
        values = [None if key is None else look_up(step, key) for key in keys]
        yield (
            name,
            tuple(
                None if value is None else (f"step.{key}", value, form(value))
                for key, value in zip(keys, values, strict=True)
            ),
        )


def step_figures(all_facts: Sequence[Facts]) -> tuple[tuple[str, tuple[Figure, ...]], ...]:
    """Return the other rows of figures of steps in named parts, one cell for each schedule."""
    return figure_parts(_ROWS, all_facts)


# -- the three answers -------------------------------------------------------------------------


def _sameness(step: Facts) -> Answer:
    question = "Are the results those of eager PyTorch?"
    found = step["certificate"]
    if found is None:
        return Answer(question=question, word="Not verified", text=REMEDY, mood="warn")
    count, many = found["compared"], len(found["differences"])
    random = "" if found["random_equal"] else "; the random generator ends in another state"
    if found["equal"]:
        text = (
            f"all {count} results (loss, gradients, buffers) and the random generator, bit by bit"
        )
        return Answer(question=question, word="Equal", text=text, mood="good")
    text = f"{many} of {count} results differ{', listed below' if many else ''}{random}"
    return Answer(question=question, word="Different", text=text, mood="bad")


def _memory(step: Facts) -> Answer:
    question = "Is the budget kept?"
    found, budget = step["certificate"], step["budget_bytes"]
    planned = step["plan"]["peak_bytes"]
    if found is None:
        text = f"the plan needs {format_bytes(planned)} of {format_bytes(budget)}"
        return Answer(question=question, word="Not measured", text=text, mood="warn")
    peak, eager = found["heap_peak_bytes"], found["eager_heap_peak_bytes"]
    text = f"heap peak {format_bytes(peak)} of {format_bytes(budget)}"
    if eager:
        text += f"; that is {share(peak / eager)} of eager PyTorch's {format_bytes(eager)}"
    if found["within_budget"]:
        return Answer(question=question, word="Kept", text=text, mood="good")
    return Answer(question=question, word="Exceeded", text=text, mood="bad")


def _speed(step: Facts) -> Answer:
    question = "How long does a step take?"
    found, planned = step["certificate"], step["plan"]["makespan_s"]
    device = step["plan"].get("device")
    plan = "" if planned is None else f"planned {format_seconds(planned)}"
    if plan and device:
        plan += f" on {device}, not on the host where the step ran"
    if found is None:
        return Answer(question=question, word="Not measured", text=plan, mood="warn")
    word = format_seconds(found["time_s"])
    eager = format_seconds(found["eager_time_s"])
    count = found.get("threads") or 0
    threads = f", {count} thread{'' if count == 1 else 's'}" if count else ""
    text = (
        f"eager PyTorch {eager}; least of several steps each{threads}{'; ' if plan else ''}{plan}"
    )
    return Answer(question=question, word=word, text=text, mood="")


# -- the rows of figures -----------------------------------------------------------------------


def _count(value: int) -> str:
    return f"{value:,}"


COLUMNS: Final = ("measured", "plan", "eager")
"""Figures measured for the step, those of its plan, and those measured for eager PyTorch."""

_MEASURED: Final[
    tuple[tuple[str, Callable[[Any], str], tuple[str | None, str | None, str | None]], ...]
] = (
    (
        "heap peak",
        format_bytes,
        ("certificate.heap_peak_bytes", "plan.peak_bytes", "certificate.eager_heap_peak_bytes"),
    ),
    ("of it tensors", format_bytes, ("certificate.storage_peak_bytes", None, None)),
    ("paged out", format_bytes, ("certificate.written_bytes", "plan.written_bytes", None)),
    ("paged in", format_bytes, ("certificate.read_bytes", "plan.read_bytes", None)),
    (
        "time of a step",
        format_seconds,
        ("certificate.time_s", "plan.makespan_s", "certificate.eager_time_s"),
    ),
)

_ROWS: Final[dict[str, tuple[Row, ...]]] = {
    "Memory of the step": (
        ("step.budget_bytes", "budget for tensors and workspaces", whole_bytes),
        ("step.keep_all_bytes", "keep-all peak (100 %)", whole_bytes),
        ("step.plan.peak_bytes", "peak of the plan", whole_bytes),
        ("step.reserved_bytes", "of it reserved", whole_bytes),
        (
            "step.certificate.second_gradients_bytes",
            "more while gradients accumulate (rollback)",
            whole_bytes,
        ),
        ("step.graph.resident_bytes.parameters", "on top of it: parameters, buffers", whole_bytes),
        ("step.graph.resident_bytes.gradients", "on top of it: gradients", whole_bytes),
    ),
    "What was captured": (
        ("step.graph.batch_size", "batch size", _count),
        ("step.graph.nodes", "operations", _count),
        ("step.graph.tensors", "tensors", _count),
        ("step.graph.scheduled_tensors", "tensors with decisions of the solver", _count),
        ("step.graph.threshold_bytes", "always kept: tensors below", whole_bytes),
    ),
    "What runs": (
        ("step.plan.instructions", "instructions", _count),
        ("step.plan.recomputed", "recomputations", _count),
        ("step.plan.mode", "transfers", str),
        ("step.plan.stall_s", "stall, as planned", format_seconds),
    ),
    "Solve": (
        ("status", "status", str),
        ("gap", "gap, of the overhead", share),
        ("requested_gap", "gap tolerance", share),
        ("build_s", "time to build models", format_seconds),
        ("solve_s", "time to search, solve and verify", format_seconds),
        ("step.compile_s", "time of compile in all", format_seconds),
    ),
}
