"""Short answers of a report: three about a schedule, three about a compiled step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from poetmodel.device.ram import DeviceRam
from poetmodel.problem.totals import format_terms
from poetmodel.report.device_ram import format_warning
from poetmodel.report.presenter import (
    format_items,
    format_precise_joules,
    format_ratio,
    value_at_path,
)
from poetmodel.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping

    Facts = Mapping[str, Any]
    AnswerTexts = tuple[str, str, str]
    """Word, text and mood of an answer."""

REMEDY: Final = "call step.verify(x, y), then write this page again"
"""Instruction for the user if a step was not compared with eager PyTorch."""


@dataclass(frozen=True, slots=True)
class KeyAnswer:
    """Answer to a question: a short phrase, and a text with the metrics that support it."""

    question: str
    word: str
    text: str
    mood: str
    """``good``, ``warn``, ``bad``, or empty: the style of the answer on a page."""


def schedule_answers(schedule: Facts) -> tuple[KeyAnswer, KeyAnswer, KeyAnswer]:
    """Answer whether a schedule fits, is proven optimal, and how much it costs."""
    return (
        KeyAnswer("Does it fit?", *_fit_answer(schedule)),
        KeyAnswer("Is it proven?", *_proof_answer(schedule)),
        KeyAnswer("What does it cost?", *_cost_answer(schedule)),
    )


def step_answers(step: Facts) -> tuple[KeyAnswer, KeyAnswer, KeyAnswer]:
    """Answer whether a step equals eager PyTorch and meets its budget, and how long it takes."""
    return (
        KeyAnswer("Are the results those of eager PyTorch?", *_equality_answer(step)),
        KeyAnswer("Is the budget met?", *_budget_answer(step)),
        KeyAnswer("How long does a step take?", *_speed_answer(step)),
    )


# -- a schedule -------------------------------------------------------------------------------


def _fit_answer(schedule: Facts) -> AnswerTexts:
    """Answer ``Fits``, ``Runs`` (no budget is stated), ``Does not fit`` or ``Rejected``."""
    peak, budget = schedule["peak_ram_bytes"], schedule["budget_bytes"]
    if not schedule["valid"]:
        count_text = format_items(len(schedule["violations"]), "violation")
        return "Rejected", f"the verifier found {count_text}, listed below", "bad"
    peak_step = schedule["binding"]
    peak_text = f"at {peak_step['node']} (stage {peak_step['stage']})"
    if peak_step["ram_bytes"] != peak:
        peak_text = f"most of it {peak_text}"
    exceeds_device = schedule["fits_device"] is False
    if budget is None:
        text = (
            f"peak RAM {format_bytes(peak)} {peak_text}; the file states no budget"
            f"{_device_remark(schedule)}"
        )
        return ("Does not fit", text, "bad") if exceeds_device else ("Runs", text, "good")
    text = (
        f"peak RAM {format_bytes(peak)} of {format_bytes(budget)}, "
        f"{format_ratio(peak / budget)}, {peak_text}"
    )
    limit_s = value_at_path(schedule, "problem.deadline_s")
    if limit_s is not None and schedule["deadline_time_s"] is not None:
        used_text = format_seconds(schedule["deadline_time_s"])
        text += f"; deadline {format_seconds(limit_s)} met with {used_text}"
    if schedule["constraints"]:
        text += f"; {format_items(len(schedule['constraints']), 'user-defined constraint')} met"
    text += _device_remark(schedule)
    return ("Does not fit", text, "bad") if exceeds_device else ("Fits", text, "good")


def _device_remark(schedule: Facts) -> str:
    """Return "; but ..." if peak and resident bytes together exceed the device's RAM, else ""."""
    if schedule["device_ram_bytes"] is None:
        return ""
    device_ram = DeviceRam(
        device=value_at_path(schedule, "device.key")
        or value_at_path(schedule, "device.name")
        or "the device",
        ram_bytes=schedule["device_ram_bytes"],
        peak_bytes=schedule["peak_ram_bytes"],
        resident_bytes=schedule["resident_bytes"],
    )
    warning = format_warning(device_ram)
    return "" if warning is None else f"; but {warning}"


def _proof_answer(schedule: Facts) -> AnswerTexts:
    """Answer ``Proven optimal``, the gap, or why there is no proof, for the minimized quantity."""
    if not schedule["valid"]:
        return "No", "the verifier rejects the schedule, so its bound has no meaning", "bad"
    objective = schedule["objective"]
    minimized = "energy" if objective is None else objective["minimize"]
    gap = schedule["gap"]
    if gap is None:
        gap_text = "without costs the bound was not compared"
        return "Unknown", gap_text if schedule["bound_j"] else "no bound is stated", "warn"
    if objective is not None and objective["bound"] is None:
        return "Not proven", "no bound was proved", "warn"
    if minimized == "own":
        name = objective.get("name")
        terms = tuple((value_at_path(schedule, "problem.weights") or {}).items())
        objective_name = format_terms(terms) if name is None else f"objective {name!r} of the model"
        bound_text = f"{objective_name} has the bound {objective['bound']:.6g}"
        quantity = "the user-defined objective" if name is None else "the objective of the model"
    elif minimized == "energy":
        bound_text = (
            "no schedule of this problem needs less than "
            f"{format_precise_joules(schedule['bound_j'])}"
        )
        quantity = "the energy overhead"
    else:
        format_value = format_seconds if minimized == "time" else format_bytes
        bound_text = (
            f"the minimum {minimized} of this problem is {format_value(objective['bound'])} or more"
        )
        quantity = f"the minimized quantity, {minimized},"
    if schedule["status"] == "optimal":
        return "Proven optimal", f"{bound_text}; gap {format_ratio(gap)}", "good"
    if gap >= 1:
        has_baseline = objective is None or objective.get("name") is None
        text = "the stated bound is only the baseline" if has_baseline else bound_text
        return "Not proven", text, "warn"
    text = f"at most {format_ratio(gap)} of {quantity} could be saved; {bound_text}"
    return f"Within {format_ratio(gap)}", text, "warn"


def _cost_answer(schedule: Facts) -> AnswerTexts:
    """Answer with the increase over a single pass: of energy, or of time if that is minimized."""
    energy_j, baseline_j = schedule["energy_j"], schedule["baseline_energy_j"]
    if energy_j is None or schedule["makespan_s"] is None:
        return "Unknown", "give --device or --profile for energies and times", "warn"
    energy_ratio = format_ratio(schedule["overhead_j"] / baseline_j) if baseline_j else "0 %"
    time_s, pass_s = schedule["makespan_s"], schedule["pass_s"]
    time_ratio = format_ratio(time_s / pass_s - 1) if pass_s else "0 %"
    baseline_intro = "a single pass, every node computed once, needs"
    if value_at_path(schedule, "objective.minimize") == "time" or not schedule["asks_energy"]:
        text = f"{format_seconds(time_s)} a step; {baseline_intro} {format_seconds(pass_s or 0.0)}"
        if schedule["asks_energy"]:
            text += f"; {format_precise_joules(energy_j)}, {energy_ratio} more than a single pass"
        return f"+{time_ratio} time", text, ""
    text = (
        f"{format_precise_joules(energy_j)} a step; {baseline_intro} "
        f"{format_precise_joules(baseline_j)}; "
        f"{format_seconds(time_s)}{f', {time_ratio} more than a single pass' if pass_s else ''}"
    )
    return f"+{energy_ratio} energy", text, ""


# -- a compiled step --------------------------------------------------------------------------


def _equality_answer(step: Facts) -> AnswerTexts:
    """Answer ``Equal``, ``Different`` or ``Not verified`` in comparison with eager PyTorch."""
    certificate = step["certificate"]
    if certificate is None:
        return "Not verified", REMEDY, "warn"
    n_compared, n_different = certificate["compared"], len(certificate["differences"])
    random_text = (
        "" if certificate["random_equal"] else "; the random generator ends in another state"
    )
    if certificate["equal"]:
        results_text = "parameters, optimizer state" if certificate.get("updates") else "gradients"
        text = (
            f"all {n_compared} results (loss, {results_text}, buffers) and the random generator, "
            "bit for bit"
        )
        return "Equal", text, "good"
    text = (
        f"{n_different} of {n_compared} results differ"
        f"{', listed below' if n_different else ''}{random_text}"
    )
    return "Different", text, "bad"


def _budget_answer(step: Facts) -> AnswerTexts:
    """Answer whether the measured heap peak is within the budget; the planned one if unmeasured."""
    certificate, budget = step["certificate"], step["budget_bytes"]
    planned_bytes = step["plan"]["peak_bytes"]
    if certificate is None:
        text = f"the plan needs {format_bytes(planned_bytes)} of {format_bytes(budget)}"
        return "Not measured", text, "warn"
    peak_bytes, eager_bytes = certificate["heap_peak_bytes"], certificate["eager_heap_peak_bytes"]
    text = f"heap peak {format_bytes(peak_bytes)} of {format_bytes(budget)}"
    if eager_bytes:
        ratio_text = format_ratio(peak_bytes / eager_bytes)
        text += f"; that is {ratio_text} of eager PyTorch's {format_bytes(eager_bytes)}"
    return ("Met", text, "good") if certificate["within_budget"] else ("Exceeded", text, "bad")


def _speed_answer(step: Facts) -> AnswerTexts:
    """Answer with the measured time, beside that of eager PyTorch and the planned one."""
    certificate, planned_s = step["certificate"], step["plan"]["makespan_s"]
    device = step["plan"].get("device")
    plan_text = "" if planned_s is None else f"planned {format_seconds(planned_s)}"
    if plan_text and device:
        plan_text += f" on {device}, not on the host where the step ran"
    if certificate is None:
        return "Not measured", plan_text, "warn"
    eager_text = format_seconds(certificate["eager_time_s"])
    n_threads = certificate.get("threads")
    threads_text = f", {format_items(n_threads, 'thread')}" if n_threads else ""
    text = (
        f"eager PyTorch {eager_text}; minimum of several steps each{threads_text}"
        f"{'; ' if plan_text else ''}{plan_text}"
    )
    return format_seconds(certificate["time_s"]), text, ""
