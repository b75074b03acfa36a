"""The answers of a report, in words: three about a schedule, three about a compiled step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from poetmodel.device.room import DeviceRoom
from poetmodel.problem.totals import in_words
from poetmodel.report.presenter import fine_joules, look_up, plural, share
from poetmodel.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping

    Facts = Mapping[str, Any]
    Words = tuple[str, str, str]

REMEDY: Final = "call step.verify(x, y), then write this page again"
"""What to do if a step was not compared with eager PyTorch."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a question: in a word or two, and the figures behind it."""

    question: str
    word: str
    text: str
    mood: str
    """``good``, ``warn``, ``bad``, or nothing."""


def answers(found: Facts) -> tuple[Answer, Answer, Answer]:
    """Return whether a schedule fits, whether it is proven, and what it costs."""
    return (
        Answer("Does it fit?", *_fit(found)),
        Answer("Is it proven?", *_proof(found)),
        Answer("What does it cost?", *_price(found)),
    )


def step_answers(step: Facts) -> tuple[Answer, Answer, Answer]:
    """Return whether a step equals eager PyTorch, keeps its budget, and how long it takes."""
    return (
        Answer("Are the results those of eager PyTorch?", *_sameness(step)),
        Answer("Is the budget kept?", *_memory(step)),
        Answer("How long does a step take?", *_speed(step)),
    )


# -- a schedule -------------------------------------------------------------------------------


def _fit(found: Facts) -> Words:
    peak, budget = found["peak_ram_bytes"], found["budget_bytes"]
    if not found["valid"]:
        many = plural(len(found["violations"]), "violation")
        return "Rejected", f"the verifier found {many}, listed below", "bad"
    binding = found["binding"]
    place = f"at {binding['node']} (stage {binding['stage']})"
    if binding["ram_bytes"] != peak:
        place = f"most of it {place}"
    over = found["fits_device"] is False
    if budget is None:
        text = f"peak RAM {format_bytes(peak)} {place}; the file states no budget{_room(found)}"
        return ("Does not fit", text, "bad") if over else ("Runs", text, "good")
    text = (
        f"peak RAM {format_bytes(peak)} of {format_bytes(budget)}, {share(peak / budget)}, {place}"
    )
    limit_s = look_up(found, "problem.deadline_s")
    if limit_s is not None and found["deadline_time_s"] is not None:
        used = format_seconds(found["deadline_time_s"])
        text += f"; deadline {format_seconds(limit_s)} kept with {used}"
    if found["constraints"]:
        text += f"; {plural(len(found['constraints']), 'own constraint')} kept"
    text += _room(found)
    return ("Does not fit", text, "bad") if over else ("Fits", text, "good")


def _room(found: Facts) -> str:
    """Return a remark if the step does not fit the RAM of the device."""
    if found["device_ram_bytes"] is None:
        return ""
    room = DeviceRoom(
        device=look_up(found, "device.key") or look_up(found, "device.name") or "the device",
        ram_bytes=found["device_ram_bytes"],
        peak_bytes=found["peak_ram_bytes"],
        resident_bytes=found["resident_bytes"],
    )
    warning = room.warning()
    return "" if warning is None else f"; but {warning}"


def _proof(found: Facts) -> Words:
    if not found["valid"]:
        return "No", "the verifier rejects the schedule, so its bound has no meaning", "bad"
    objective = found["objective"]
    minimized = "energy" if objective is None else objective["minimize"]
    gap = found["gap"]
    if gap is None:
        compared = "without costs the bound was not compared"
        return "Unknown", compared if found["bound_j"] else "no bound is stated", "warn"
    if minimized == "own":
        name = objective.get("name")
        terms = tuple((look_up(found, "problem.weights") or {}).items())
        of = in_words(terms) if name is None else f"objective {name!r} of the model"
        least = f"{of} has the bound {objective['bound']:.6g}"
        whole = "the own objective" if name is None else "the objective of the model"
    elif minimized == "energy":
        least = f"no schedule of this problem needs less than {fine_joules(found['bound_j'])}"
        whole = "the energy overhead"
    else:
        form = format_seconds if minimized == "time" else format_bytes
        least = f"the least {minimized} of this problem is {form(objective['bound'])} or more"
        whole = f"the minimized quantity, {minimized},"
    if found["status"] == "optimal":
        return "Proven optimal", f"{least}; gap {share(gap)}", "good"
    if gap >= 1:
        return "Not proven", "the stated bound is only what every schedule pays", "warn"
    text = f"at most {share(gap)} of {whole} could be saved; {least}"
    return f"Within {share(gap)}", text, "warn"


def _price(found: Facts) -> Words:
    energy_j, baseline_j = found["energy_j"], found["baseline_energy_j"]
    if energy_j is None or found["makespan_s"] is None:
        return "Unknown", "give --device or --profile for energies and times", "warn"
    more = share(found["overhead_j"] / baseline_j) if baseline_j else "0 %"
    time_s, pass_s = found["makespan_s"], found["pass_s"]
    longer = share(time_s / pass_s - 1) if pass_s else "0 %"
    single = "a single pass, every node computed once, needs"
    if look_up(found, "objective.minimize") == "time" or not found["asks_energy"]:
        text = f"{format_seconds(time_s)} a step; {single} {format_seconds(pass_s or 0.0)}"
        if found["asks_energy"]:
            text += f"; {fine_joules(energy_j)}, {more} more than a single pass"
        return f"+{longer} time", text, ""
    text = (
        f"{fine_joules(energy_j)} a step; {single} {fine_joules(baseline_j)}; "
        f"{format_seconds(time_s)}{f', {longer} more than a single pass' if pass_s else ''}"
    )
    return f"+{more} energy", text, ""


# -- a compiled step --------------------------------------------------------------------------


def _sameness(step: Facts) -> Words:
    found = step["certificate"]
    if found is None:
        return "Not verified", REMEDY, "warn"
    count, many = found["compared"], len(found["differences"])
    random = "" if found["random_equal"] else "; the random generator ends in another state"
    if found["equal"]:
        what = "parameters, optimizer state" if found.get("updates") else "gradients"
        text = f"all {count} results (loss, {what}, buffers) and the random generator, bit for bit"
        return "Equal", text, "good"
    text = f"{many} of {count} results differ{', listed below' if many else ''}{random}"
    return "Different", text, "bad"


def _memory(step: Facts) -> Words:
    found, budget = step["certificate"], step["budget_bytes"]
    planned = step["plan"]["peak_bytes"]
    if found is None:
        text = f"the plan needs {format_bytes(planned)} of {format_bytes(budget)}"
        return "Not measured", text, "warn"
    peak, eager = found["heap_peak_bytes"], found["eager_heap_peak_bytes"]
    text = f"heap peak {format_bytes(peak)} of {format_bytes(budget)}"
    if eager:
        text += f"; that is {share(peak / eager)} of eager PyTorch's {format_bytes(eager)}"
    return ("Kept", text, "good") if found["within_budget"] else ("Exceeded", text, "bad")


def _speed(step: Facts) -> Words:
    found, planned = step["certificate"], step["plan"]["makespan_s"]
    device = step["plan"].get("device")
    plan = "" if planned is None else f"planned {format_seconds(planned)}"
    if plan and device:
        plan += f" on {device}, not on the host where the step ran"
    if found is None:
        return "Not measured", plan, "warn"
    if planned and found.get("reasons"):
        ratio = found["time_s"] / planned
        plan += f"; measured is {ratio:.2f} times planned, for reasons that are listed"
    eager = format_seconds(found["eager_time_s"])
    count = found.get("threads")
    threads = f", {plural(count, 'thread')}" if count else ""
    text = (
        f"eager PyTorch {eager}; least of several steps each{threads}{'; ' if plan else ''}{plan}"
    )
    return format_seconds(found["time_s"]), text, ""
