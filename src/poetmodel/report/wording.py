"""The answers of a report, in words: three about a schedule, three about a compiled step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from poetmodel.device.ram import DeviceRam
from poetmodel.problem.totals import format_terms
from poetmodel.report.presenter import fine_joules, look_up, plural, share
from poetmodel.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping

    Facts = Mapping[str, Any]
    Words = tuple[str, str, str]

REMEDY: Final = "call step.verify(x, y), then write this page again"
"""Remedy if a step was not compared with eager PyTorch."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a question: in a word or two, and the figures behind it."""

    question: str
    word: str
    text: str
    mood: str
    """``good``, ``warn``, ``bad``, or nothing."""


def answers(schedule: Facts) -> tuple[Answer, Answer, Answer]:
    """Whether a schedule fits, whether it is proven, and what it costs."""
    return (
        Answer("Does it fit?", *_fit(schedule)),
        Answer("Is it proven?", *_proof(schedule)),
        Answer("What does it cost?", *_price(schedule)),
    )


def step_answers(step: Facts) -> tuple[Answer, Answer, Answer]:
    """Whether a step equals eager PyTorch, keeps its budget, and how long it takes."""
    return (
        Answer("Are the results those of eager PyTorch?", *_sameness(step)),
        Answer("Is the budget kept?", *_memory(step)),
        Answer("How long does a step take?", *_speed(step)),
    )


# -- a schedule -------------------------------------------------------------------------------


def _fit(schedule: Facts) -> Words:
    peak, budget = schedule["peak_ram_bytes"], schedule["budget_bytes"]
    if not schedule["valid"]:
        many = plural(len(schedule["violations"]), "violation")
        return "Rejected", f"the verifier found {many}, listed below", "bad"
    binding = schedule["binding"]
    moment = f"at {binding['node']} (stage {binding['stage']})"
    if binding["ram_bytes"] != peak:
        moment = f"most of it {moment}"
    over = schedule["fits_device"] is False
    if budget is None:
        text = f"peak RAM {format_bytes(peak)} {moment}; the file states no budget{_room(schedule)}"
        return ("Does not fit", text, "bad") if over else ("Runs", text, "good")
    text = (
        f"peak RAM {format_bytes(peak)} of {format_bytes(budget)}, {share(peak / budget)}, {moment}"
    )
    limit_s = look_up(schedule, "problem.deadline_s")
    if limit_s is not None and schedule["deadline_time_s"] is not None:
        used = format_seconds(schedule["deadline_time_s"])
        text += f"; deadline {format_seconds(limit_s)} kept with {used}"
    if schedule["constraints"]:
        text += f"; {plural(len(schedule['constraints']), 'own constraint')} kept"
    text += _room(schedule)
    return ("Does not fit", text, "bad") if over else ("Fits", text, "good")


def _room(schedule: Facts) -> str:
    """Return a remark if the step does not fit the RAM of the device."""
    if schedule["device_ram_bytes"] is None:
        return ""
    room = DeviceRam(
        device=look_up(schedule, "device.key") or look_up(schedule, "device.name") or "the device",
        ram_bytes=schedule["device_ram_bytes"],
        peak_bytes=schedule["peak_ram_bytes"],
        resident_bytes=schedule["resident_bytes"],
    )
    warning = room.warning()
    return "" if warning is None else f"; but {warning}"


def _proof(schedule: Facts) -> Words:
    if not schedule["valid"]:
        return "No", "the verifier rejects the schedule, so its bound has no meaning", "bad"
    objective = schedule["objective"]
    minimized = "energy" if objective is None else objective["minimize"]
    gap = schedule["gap"]
    if gap is None:
        compared = "without costs the bound was not compared"
        return "Unknown", compared if schedule["bound_j"] else "no bound is stated", "warn"
    if minimized == "own":
        name = objective.get("name")
        terms = tuple((look_up(schedule, "problem.weights") or {}).items())
        of = format_terms(terms) if name is None else f"objective {name!r} of the model"
        least = f"{of} has the bound {objective['bound']:.6g}"
        whole = "the own objective" if name is None else "the objective of the model"
    elif minimized == "energy":
        least = f"no schedule of this problem needs less than {fine_joules(schedule['bound_j'])}"
        whole = "the energy overhead"
    else:
        form = format_seconds if minimized == "time" else format_bytes
        least = f"the least {minimized} of this problem is {form(objective['bound'])} or more"
        whole = f"the minimized quantity, {minimized},"
    if schedule["status"] == "optimal":
        return "Proven optimal", f"{least}; gap {share(gap)}", "good"
    if gap >= 1:
        return "Not proven", "the stated bound is only what every schedule pays", "warn"
    text = f"at most {share(gap)} of {whole} could be saved; {least}"
    return f"Within {share(gap)}", text, "warn"


def _price(schedule: Facts) -> Words:
    energy_j, baseline_j = schedule["energy_j"], schedule["baseline_energy_j"]
    if energy_j is None or schedule["makespan_s"] is None:
        return "Unknown", "give --device or --profile for energies and times", "warn"
    more = share(schedule["overhead_j"] / baseline_j) if baseline_j else "0 %"
    time_s, pass_s = schedule["makespan_s"], schedule["pass_s"]
    longer = share(time_s / pass_s - 1) if pass_s else "0 %"
    single = "a single pass, every node computed once, needs"
    if look_up(schedule, "objective.minimize") == "time" or not schedule["asks_energy"]:
        text = f"{format_seconds(time_s)} a step; {single} {format_seconds(pass_s or 0.0)}"
        if schedule["asks_energy"]:
            text += f"; {fine_joules(energy_j)}, {more} more than a single pass"
        return f"+{longer} time", text, ""
    text = (
        f"{fine_joules(energy_j)} a step; {single} {fine_joules(baseline_j)}; "
        f"{format_seconds(time_s)}{f', {longer} more than a single pass' if pass_s else ''}"
    )
    return f"+{more} energy", text, ""


# -- a compiled step --------------------------------------------------------------------------


def _sameness(step: Facts) -> Words:
    certificate = step["certificate"]
    if certificate is None:
        return "Not verified", REMEDY, "warn"
    count, many = certificate["compared"], len(certificate["differences"])
    random = "" if certificate["random_equal"] else "; the random generator ends in another state"
    if certificate["equal"]:
        what = "parameters, optimizer state" if certificate.get("updates") else "gradients"
        text = f"all {count} results (loss, {what}, buffers) and the random generator, bit for bit"
        return "Equal", text, "good"
    text = f"{many} of {count} results differ{', listed below' if many else ''}{random}"
    return "Different", text, "bad"


def _memory(step: Facts) -> Words:
    certificate, budget = step["certificate"], step["budget_bytes"]
    planned = step["plan"]["peak_bytes"]
    if certificate is None:
        text = f"the plan needs {format_bytes(planned)} of {format_bytes(budget)}"
        return "Not measured", text, "warn"
    peak, eager = certificate["heap_peak_bytes"], certificate["eager_heap_peak_bytes"]
    text = f"heap peak {format_bytes(peak)} of {format_bytes(budget)}"
    if eager:
        text += f"; that is {share(peak / eager)} of eager PyTorch's {format_bytes(eager)}"
    return ("Kept", text, "good") if certificate["within_budget"] else ("Exceeded", text, "bad")


def _speed(step: Facts) -> Words:
    certificate, planned = step["certificate"], step["plan"]["makespan_s"]
    device = step["plan"].get("device")
    plan = "" if planned is None else f"planned {format_seconds(planned)}"
    if plan and device:
        plan += f" on {device}, not on the host where the step ran"
    if certificate is None:
        return "Not measured", plan, "warn"
    eager = format_seconds(certificate["eager_time_s"])
    count = certificate.get("threads")
    threads = f", {plural(count, 'thread')}" if count else ""
    text = (
        f"eager PyTorch {eager}; least of several steps each{threads}{'; ' if plan else ''}{plan}"
    )
    return format_seconds(certificate["time_s"]), text, ""
