"""The words of a report: three answers and rows of figures for each schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from poetmodel.device.room import DeviceRoom
from poetmodel.units import format_bytes, format_joules, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    Facts = Mapping[str, Any]
    Row = tuple[str, str, Callable[[Any], str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to one of three questions."""

    question: str
    """The question."""
    word: str
    """The answer in a word or two."""
    text: str
    """The figures behind it."""
    mood: str
    """``good``, ``warn``, ``bad``, or nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A row of the table of figures."""

    key: str
    """Path of the value in the facts: keys with points between them."""
    name: str
    """Its name."""
    cells: tuple[tuple[Any, str], ...]
    """Value and text for each schedule."""


def answers(found: Facts) -> tuple[Answer, Answer, Answer]:
    """Return whether a schedule fits, whether it is proven, and what it costs."""
    return _fit(found), _proof(found), _price(found)


def figures(all_facts: Sequence[Facts]) -> tuple[tuple[str, tuple[Figure, ...]], ...]:
    """Return the rows of figures in named parts, without rows that are empty for all schedules."""
    return figure_parts(_ROWS, all_facts)


def figure_parts(
    parts: Mapping[str, Sequence[Row]], all_facts: Sequence[Facts]
) -> tuple[tuple[str, tuple[Figure, ...]], ...]:
    """Return rows of figures in named parts, without empty rows and parts.

    Parameters
    ----------
    parts : mapping
        For each part its rows: path of the value, name, and format.
    all_facts : sequence of mapping
        The facts of each schedule.
    """
    found = []
    for part, rows in parts.items():
        kept = []
        for key, name, form in rows:
            values = [look_up(facts, key) for facts in all_facts]
            if any(value is not None for value in values):
                cells = tuple((value, "" if value is None else form(value)) for value in values)
                kept.append(Figure(key=key, name=name, cells=cells))
        if kept:
            found.append((part, tuple(kept)))
    return tuple(found)


def look_up(found: Facts, key: str) -> Any:
    """Return the value at a path of keys, None where the path ends early."""
    value: Any = found
    for name in key.split("."):
        if value is None:
            return None
        value = value.get(name)
    return value


def share(ratio: float) -> str:
    """Return a ratio as a percentage: ``0.333 %``.

    Examples
    --------
    >>> share(0.0033294), share(0), share(1)
    ('0.3329 %', '0 %', '100 %')
    """
    return f"{round(100 * ratio, 6):.4g} %"


def whole_bytes(size: float) -> str:
    """Return a size in bytes, and in a larger unit if it has one.

    Examples
    --------
    >>> whole_bytes(1536), whole_bytes(12)
    ('1,536 B (1.50 KiB)', '12 B')
    """
    rounded = format_bytes(size)
    exact = f"{size:,.0f} B"
    return exact if rounded == exact else f"{exact} ({rounded})"


def fine_joules(energy_j: float) -> str:
    """Return an energy with seven digits, so that close bounds look different.

    Examples
    --------
    >>> fine_joules(5.0317041), fine_joules(0.0167), fine_joules(0.0)
    ('5.031704 J', '16.7 mJ', '0 J')
    """
    for prefix, factor in (("", 1.0), ("m", 1e-3), ("u", 1e-6)):
        if abs(energy_j) >= factor:
            return f"{energy_j / factor:,.7g} {prefix}J"
    return f"{energy_j:.7g} J"


# -- the three answers -------------------------------------------------------------------------


def _fit(found: Facts) -> Answer:
    question = "Does it fit?"
    peak, budget = found["peak_ram_bytes"], found["budget_bytes"]
    if not found["valid"]:
        many = len(found["violations"])
        text = f"the verifier found {many} violation{'' if many == 1 else 's'}, listed below"
        return Answer(question=question, word="Rejected", text=text, mood="bad")
    binding = found["binding"]
    place = f"at {binding['node']} (stage {binding['stage']})"
    over = found["fits_device"] is False
    if budget is None:
        text = f"peak RAM {format_bytes(peak)} {place}; the file states no budget{_room(found)}"
        word, mood = ("Does not fit", "bad") if over else ("Runs", "good")
        return Answer(question=question, word=word, text=text, mood=mood)
    text = (
        f"peak RAM {format_bytes(peak)} of {format_bytes(budget)}, {share(peak / budget)}, {place}"
    )
    limit_s = look_up(found, "problem.deadline_s")
    if limit_s is not None and found["deadline_time_s"] is not None:
        used = format_seconds(found["deadline_time_s"])
        text += f"; deadline {format_seconds(limit_s)} kept with {used}"
    text += _room(found)
    if over:
        return Answer(question=question, word="Does not fit", text=text, mood="bad")
    return Answer(question=question, word="Fits", text=text, mood="good")


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


def _proof(found: Facts) -> Answer:
    question = "Is it proven?"
    if not found["valid"]:
        text = "the verifier rejects the schedule, so its bound has no meaning"
        return Answer(question=question, word="No", text=text, mood="bad")
    objective = found["objective"]
    aim = "energy" if objective is None else objective["minimize"]
    gap = found["gap"] if aim == "energy" else objective["gap"]
    if gap is None:
        text = (
            "without costs the bound was not compared" if found["bound_j"] else "no bound is stated"
        )
        return Answer(question=question, word="Unknown", text=text, mood="warn")
    if aim == "own":
        bound = objective["bound"]
        least = f"objective {objective['name']!r} of the model has the bound {bound:.6g}"
        whole = "the objective of the model"
    elif aim == "energy":
        least = f"no schedule of this problem needs less than {fine_joules(found['bound_j'])}"
        whole = "the energy overhead"
    else:
        form = format_seconds if aim == "time" else format_bytes
        least = f"the least {aim} of this problem is {form(objective['bound'])} or more"
        whole = f"the minimized quantity, {aim},"
    if found["status"] == "optimal":
        text = f"{least}; gap {share(gap)}"
        return Answer(question=question, word="Proven optimal", text=text, mood="good")
    if gap >= 1:
        text = "the stated bound is only what every schedule pays"
        return Answer(question=question, word="Not proven", text=text, mood="warn")
    text = f"at most {share(gap)} of {whole} could be saved; {least}"
    return Answer(question=question, word=f"Within {share(gap)}", text=text, mood="warn")


def _price(found: Facts) -> Answer:
    question = "What does it cost?"
    energy_j, baseline_j = found["energy_j"], found["baseline_energy_j"]
    if energy_j is None or found["makespan_s"] is None:
        text = "give --device or --profile for energies and times"
        return Answer(question=question, word="Unknown", text=text, mood="warn")
    share_of = share(found["overhead_j"] / baseline_j) if baseline_j else "0 %"
    time_s, pass_s = found["makespan_s"], found["pass_s"]
    longer = f", {share(time_s / pass_s - 1)} more than a single pass" if pass_s else ""
    text = (
        f"{fine_joules(energy_j)} a step; a single pass, every node computed once, needs "
        f"{fine_joules(baseline_j)}; {format_seconds(time_s)}{longer}"
    )
    return Answer(question=question, word=f"+{share_of} energy", text=text, mood="")


# -- the rows of figures -----------------------------------------------------------------------


def _whole(value: float) -> str:
    return f"{value:,.12g}"


def _yes(value: bool) -> str:  # noqa: FBT001 - a value to show
    return "yes" if value else "no"


_ROWS: Final[dict[str, tuple[Row, ...]]] = {
    "Verdict": (
        ("valid", "valid, as verified", _yes),
        ("status", "status in the file", str),
        ("energy_j", "energy of a step", fine_joules),
        ("baseline_energy_j", "baseline: a single pass", fine_joules),
        ("overhead_j", "overhead", fine_joules),
    ),
    "Certificate": (
        ("bound_j", "proven bound on the energy", fine_joules),
        ("overhead_bound_j", "proven bound on the overhead", fine_joules),
        ("gap", "gap, of the overhead", share),
        ("requested_gap", "gap tolerance", share),
        ("objective.minimize", "minimized", str),
        ("problem.method", "method", str),
        ("problem.formulation", "formulation", str),
        ("problem.backend", "back end", str),
        ("build_s", "time to build models", format_seconds),
        ("solve_s", "time to search, solve and verify", format_seconds),
    ),
    "Memory": (
        ("peak_ram_bytes", "peak RAM", whole_bytes),
        ("budget_bytes", "RAM for tensors", whole_bytes),
        ("problem.ram_budget_bytes", "RAM budget as given", whole_bytes),
        ("resident_bytes", "resident bytes, on top of the peak", whole_bytes),
        ("device_ram_bytes", "RAM of the device", whole_bytes),
        ("fits_device", "fits the device", _yes),
        ("aux_used_bytes", "storage used", whole_bytes),
        ("written_bytes", "paged out", whole_bytes),
        ("read_bytes", "paged in", whole_bytes),
    ),
    "Time": (
        ("compute_s", "compute time", format_seconds),
        ("transfer_s", "transfer time", format_seconds),
        ("makespan_s", "makespan", format_seconds),
        ("pass_s", "time of a single pass", format_seconds),
        ("problem.deadline_s", "deadline", format_seconds),
        ("problem.deadline_counts", "time that the deadline limits", str),
        ("plan.mode", "transfers of the plan", str),
        ("plan.stall_s", "stall of the plan", format_seconds),
        ("plan.makespan_s", "makespan of the plan", format_seconds),
        ("plan.peak_ram_bytes", "peak RAM of the plan", whole_bytes),
    ),
    "Decisions": (
        ("decisions.recomputations", "recomputations", _whole),
        ("decisions.page_outs", "page-outs", _whole),
        ("decisions.page_ins", "page-ins", _whole),
    ),
    "Limits": (
        ("problem.recompute", "recomputation allowed", _yes),
        ("problem.paging", "paging allowed", _yes),
        ("problem.energy_budget_j", "energy budget", format_joules),
        ("problem.aux_bytes", "storage limit", whole_bytes),
        ("problem.count_parameters", "parameters count in the budget", _yes),
    ),
    "Device": (
        ("device.name", "device", str),
        ("device.core", "core", str),
        ("device.costs", "costs from", str),
        ("device.ram_bytes", "RAM", whole_bytes),
        ("device.aux_bytes", "storage", whole_bytes),
        ("device.flops_per_s", "computes [FLOP/s]", _whole),
        ("device.ram_bytes_per_s", "RAM bandwidth [B/s]", _whole),
        ("device.power_w", "power while computing [W]", _whole),
        ("device.flops_per_j", "efficiency [FLOP/J]", _whole),
        ("device.idle_power_w", "idle power [W]", _whole),
        ("device.storage_mode", "transfers", str),
        ("device.page_in.bytes_per_s", "page-in rate [B/s]", _whole),
        ("device.page_in.latency_s", "page-in latency", format_seconds),
        ("device.page_in.power_w", "page-in power [W]", _whole),
        ("device.page_out.bytes_per_s", "page-out rate [B/s]", _whole),
        ("device.page_out.latency_s", "page-out latency", format_seconds),
        ("device.page_out.power_w", "page-out power [W]", _whole),
    ),
}
FIRST_PARTS: Final = ("Verdict", "Certificate", "Memory", "Time", "Decisions")
"""Parts in the table of figures; the others are among the facts."""


def graph_rows(graph: Facts) -> Iterator[tuple[str, str]]:
    """Yield name and text of each fact about the graph."""
    yield "network", graph["name"]
    yield "nodes", f"{graph['nodes']:,}"
    yield "tensors", f"{graph['tensors']:,}"
    yield "edges", f"{graph['edges']:,}"
    yield "FLOP of a step", f"{graph['flops']:,}"
    yield "batch size, type", f"{graph['batch_size']:,}, {graph['dtype']}"
    yield "keep-all peak", whole_bytes(graph["checkpoint_all_peak_bytes"])
    floor = whole_bytes(graph["floor_bytes"])
    yield "minimum RAM", f"{floor}, needed by {graph['floor_node']}"
    for kind, size in graph["resident_bytes"].items():
        yield f"resident: {kind}", whole_bytes(size)
    yield "sha256", graph["sha256"]
