"""``poetmodel diff``: two schedules of one graph side by side, and their different decisions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from poetmodel.cli import graphs, options  # noqa: TC001 - typer reads them
from poetmodel.cli.failures import print_warnings
from poetmodel.cli.output import listing, print_json, print_text, show
from poetmodel.cli.stated import read_stated
from poetmodel.device.room import room_figures
from poetmodel.graph.catalogue import InputShape
from poetmodel.units import format_bytes, format_joules, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from poetmodel.cli.stated import Stated
    from poetmodel.schedule.decisions import Decision

EPILOG: Final = "Example: poetmodel diff mlp.json mlp.json --graph mlp"

SHOWN: Final = 40
"""Most tensors that the table shows; JSON has all of them."""

FirstArgument = Annotated[
    Path, typer.Argument(metavar="A", help="A schedule file.", show_default=False)
]
SecondArgument = Annotated[
    Path,
    typer.Argument(
        metavar="B", help="Another schedule file of the same graph.", show_default=False
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulePair:
    """Two schedules of one graph."""

    sides: tuple[Stated, Stated]
    """The schedules."""
    decisions: tuple[Sequence[Decision], Sequence[Decision]]
    """The decisions for each tensor, for each schedule."""

    def changed(self) -> Iterator[tuple[Decision, Decision]]:
        """Yield the tensors with different decisions."""
        for one, other in zip(*self.decisions, strict=True):
            if _deeds(one) != _deeds(other):
                yield one, other


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("diff", epilog=EPILOG)(diff)


def diff(
    a: FirstArgument,
    b: SecondArgument,
    *,
    graph: graphs.GraphOption = None,
    batch: graphs.BatchOption = None,
    image: graphs.ImageOption = None,
    sequence: graphs.SequenceOption = None,
    device: options.DeviceOption = None,
    profile: options.ProfileOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,  # noqa: ARG001 - acts while it is parsed
) -> None:
    """Compare two schedules of one graph, made for other budgets or devices or by other methods."""
    from poetmodel.schedule.decisions import find_decisions

    shape = InputShape(batch=batch, image=image, sequence=sequence)
    sides = (
        read_stated(a, graph, shape, device=device, profile=profile),
        read_stated(b, graph, shape, device=device, profile=profile),
    )
    print_warnings(dict.fromkeys(note for side in sides for note in side.notes))
    first, second = (find_decisions(side.problem, side.schedule) for side in sides)
    pair = SchedulePair(sides=sides, decisions=(first, second))
    rooms = [side.room for side in sides if side.room is not None]
    print_warnings(dict.fromkeys(text for room in rooms if (text := room.warning())))
    if json:
        print_json(as_dict(pair, (a, b)))
    else:
        _print(pair, (a, b))


def as_dict(pair: SchedulePair, paths: tuple[Path, Path]) -> dict[str, Any]:
    """Return two schedules as plain values in SI units: figures of each, and what changed."""
    graph = pair.sides[0].problem.graph
    return {
        "graph": {"name": graph.name, "sha256": graph.sha256},
        "schedules": [
            {"file": str(path)} | _facts(side) for path, side in zip(paths, pair.sides, strict=True)
        ],
        "changed": [
            {
                "tensor": graph.tensors[one.tensor].name,
                "bytes": graph.tensor_bytes[one.tensor],
                "a": _side(one),
                "b": _side(other),
            }
            for one, other in pair.changed()
        ],
    }


def _side(decision: Decision) -> dict[str, Any]:
    return {
        "fate": str(decision.choice),
        "recomputed": list(decision.recomputed),
        "paged_out": list(decision.paged_out),
        "paged_in": list(decision.paged_in),
        "energy_j": decision.energy_j,
        "time_s": decision.time_s,
    }


def _facts(side: Stated) -> dict[str, Any]:
    simulation, problem = side.verdict.simulation, side.problem
    stated = side.document.problem
    return {
        "device": side.document.device,
        "method": None if stated is None else stated.method,
        "status": side.document.status,
        "ram_budget_bytes": problem.ram_budget_bytes,
        "deadline_s": problem.deadline_s,
        "energy_j": simulation.energy_j,
        "overhead_j": simulation.overhead_j,
        "time_s": simulation.time_s,
        "compute_s": simulation.compute_s,
        "transfer_s": simulation.transfer_s,
        "peak_ram_bytes": simulation.peak_ram_bytes,
        **room_figures(side.room),
        "written_bytes": simulation.written_bytes,
        "read_bytes": simulation.read_bytes,
        "recomputations": sum(k < t for t, k in side.schedule.R),
    }


def _deeds(decision: Decision) -> tuple[tuple[int, ...], ...]:
    """Return the stages of what is done to a tensor; when it is dropped follows from them."""
    return decision.recomputed, decision.paged_out, decision.paged_in


def _print(pair: SchedulePair, paths: tuple[Path, Path]) -> None:
    graph = pair.sides[0].problem.graph
    facts = [_facts(side) for side in pair.sides]
    rows = [
        (words, *(form(fact[key]) for fact in facts), _change(form, *(fact[key] for fact in facts)))
        for key, words, form in _ROWS
    ]
    names = [path.name if paths[0].name != paths[1].name else str(path) for path in paths]
    show(listing(f"Schedules for {graph.name}", ("", *names, "change"), rows))
    changed = list(pair.changed())
    if not changed:
        print_text("Both schedules decide the same for every tensor.")
        return
    size = graph.tensor_bytes
    changed.sort(key=lambda pair: -size[pair[0].tensor])
    cells = [
        (
            graph.tensors[one.tensor].name,
            *_words(one, other),
            format_bytes(size[one.tensor]),
        )
        for one, other in changed[:SHOWN]
    ]
    many = "1 tensor" if len(changed) == 1 else f"{len(changed)} tensors"
    show(listing(f"Different decisions: {many}", ("tensor", *names, "bytes"), cells, left=3))
    if len(changed) > SHOWN:
        print_text(f"and {len(changed) - SHOWN} more; --json has them all")


def _words(one: Decision, other: Decision) -> tuple[str, str]:
    """Return what each schedule does to a tensor, with the stages if they do the same."""
    first, second = _word(one), _word(other)
    if first != second:
        return first, second
    return f"{first} {_listed(one)}", f"{second} {_listed(other)}"


def _word(decision: Decision) -> str:
    times = len(_stages(decision))
    return f"{decision.choice} x{times}" if times > 1 else str(decision.choice)


def _listed(decision: Decision) -> str:
    return f"at {','.join(map(str, _stages(decision)))}"


def _stages(decision: Decision) -> list[int]:
    return sorted((*decision.recomputed, *decision.paged_in))


def _change(form: Callable[[Any], str], one: Any, other: Any) -> str:
    """Return by how much a figure grows; empty for words and for equal figures."""
    if (
        isinstance(one, bool)
        or not isinstance(one, int | float)
        or not isinstance(other, int | float)
        or one == other
    ):
        return ""
    return f"{'-' if other < one else '+'}{form(abs(other - one))}"


def _word_or_none(value: Any) -> str:
    return "none" if value is None else str(value)


def _bytes_or_none(value: float | None) -> str:
    return "none" if value is None else format_bytes(value)


def _yes_or_none(value: object) -> str:
    return "" if value is None else "yes" if value else "NO"


def _seconds_or_none(value: float | None) -> str:
    return "none" if value is None else format_seconds(value)


_ROWS: Final[tuple[tuple[str, str, Callable[[Any], str]], ...]] = (
    ("device", "device", _word_or_none),
    ("method", "method", _word_or_none),
    ("status", "status", _word_or_none),
    ("ram_budget_bytes", "RAM budget", format_bytes),
    ("deadline_s", "deadline", _seconds_or_none),
    ("energy_j", "energy", format_joules),
    ("overhead_j", "overhead", format_joules),
    ("time_s", "time", format_seconds),
    ("peak_ram_bytes", "peak RAM", format_bytes),
    ("device_ram_bytes", "device RAM", _bytes_or_none),
    ("fits_device", "fits device", _yes_or_none),
    ("written_bytes", "paged out", format_bytes),
    ("read_bytes", "paged in", format_bytes),
    ("recomputations", "recomputations", str),
)
"""Key, words and form of each figure in the table."""
