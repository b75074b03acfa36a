"""Migration: which state of an earlier export a step takes over from storage, and where it lies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from poetmodel.errors import InputError, listed, raised_as
from poetmodel.files import parse_json, read_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from poetmodel.lowered.calls import NamedTensor
    from poetmodel.lowered.step import LoweredStep

_MANIFEST: Final = "manifest.json"
_KEYS: Final = (
    "step_id", "layout_id", "instance_id", "commit_unit", "commit_block", "checksums", "shared",
    "page_slots", "stored_bytes", "in_flash", "tensor_bytes", "states",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedPiece:
    """Elements of a buffer that are taken over, from a tensor of the earlier generation."""

    buffer: str
    first: int
    count: int
    tensor: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """What a step takes over of the state of another one."""

    source: Mapping[str, Any]
    """How the other one wrote a generation: the key ``generation`` of its manifest."""
    pieces: tuple[CarriedPiece, ...]
    taken: tuple[str, ...]
    """State tensors with the same names, shapes and types there."""
    anew: tuple[str, ...]
    """Replaced state that begins with first values."""
    left: tuple[str, ...]
    """State of the other one that this one has not."""


def state_pieces(step: LoweredStep, value: NamedTensor) -> Iterator[tuple[str, int, int]]:
    """Yield (buffer, first element, number of elements) of each piece of a state tensor."""
    left = value.elements
    for ref in value.pieces:
        here = min(left, step.buffers[ref.buffer].elements - ref.offset)
        yield ref.buffer, ref.offset, here
        left -= here


def load_source(folder: str | Path) -> dict[str, Any]:
    """Return how an exported folder writes generations.

    Raises
    ------
    InputError
        If the folder is none of an export, or has no generations.
    """
    path = Path(folder) / _MANIFEST
    text = read_text(path)
    with raised_as(InputError, f"migrate_from: {path}"):
        document = parse_json(text, expected="manifest of an export")
        if not isinstance(document, dict) or document.get("format") != "poetmodel-export":
            raise InputError("expected the manifest of a folder that poetmodel export made")
        source = document.get("generation")
        if not isinstance(source, dict) or any(key not in source for key in _KEYS):
            what = "does not say how" if document.get("commit") else "has no commits, so that none"
            raise InputError(
                f"{what} state lies on storage; name a folder that was exported with commit, by "
                "this version (the same command gives the same state)"
            )
        return source


def migration_of(step: LoweredStep, source: Mapping[str, Any]) -> Migration:
    """Return what a step takes over of another one's state.

    Raises
    ------
    InputError
        If they have no state of equal name, shape and type.
    """
    graph, states = step.graph, source["states"]
    replaced = {graph.tensors[old].name for old in graph.replacement_of}
    own = [v for v in step.states if all(ref.buffer in replaced for ref in v.pieces)]
    taken = [value for value in own if _is_alike(value, states.get(value.name))]
    if not taken:
        raise InputError(
            f"migrate_from: {step.graph.name} has no state of the same name, shape and type as "
            f"{listed(sorted(states))} of the other folder"
        )
    names = {value.name for value in taken}
    return Migration(
        source=source,
        pieces=tuple(piece for v in taken for piece in _overlaps(step, v, states[v.name])),
        taken=tuple(v.name for v in own if v.name in names),
        anew=tuple(v.name for v in own if v.name not in names),
        left=tuple(name for name in states if name not in names),
    )


def _is_alike(value: NamedTensor, other: Mapping[str, Any] | None) -> bool:
    return other is not None and (list(value.shape), str(value.type)) == (
        other["shape"],
        other["dtype"],
    )


def _overlaps(
    step: LoweredStep, value: NamedTensor, other: Mapping[str, Any]
) -> Iterator[CarriedPiece]:
    """Yield the parts that a tensor has in common in the pieces of both steps."""
    own = _placed([(name, offset, n) for name, offset, n in state_pieces(step, value)])
    there = _placed([(tensor, offset, n) for tensor, offset, n in other["pieces"]])
    for begin, name, offset, count in own:
        for start, tensor, at, size in there:
            low, high = max(begin, start), min(begin + count, start + size)
            if low < high:
                yield CarriedPiece(
                    buffer=name,
                    first=offset + low - begin,
                    count=high - low,
                    tensor=tensor,
                    offset=at + low - start,
                )


def _placed(pieces: Sequence[tuple[Any, int, int]]) -> list[tuple[int, Any, int, int]]:
    """Return pieces, each with its first element in the whole tensor."""
    begin, placed = 0, []
    for name, offset, count in pieces:
        placed.append((begin, name, offset, count))
        begin += count
    return placed
