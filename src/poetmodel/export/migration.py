"""Migration: the state that a step reads from the storage of an earlier export."""

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
    """Elements of a buffer that are copied from one tensor of the earlier generation."""

    buffer: str
    first: int
    """First element in the buffer."""
    count: int
    """Number of elements."""
    tensor: int
    """Index of the tensor in the earlier generation."""
    offset: int
    """First element in that tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """The state that a step reads from a generation of another step."""

    source: Mapping[str, Any]
    """Layout of the other step's generations: the key ``generation`` of its manifest."""
    pieces: tuple[CarriedPiece, ...]
    migrated: tuple[str, ...]
    """State tensors with the same name, shape and type in the other step."""
    reset: tuple[str, ...]
    """State that this step updates without a match in the other step; it has its initial values."""
    dropped: tuple[str, ...]
    """State of the other step without a match in this step."""


def state_pieces(step: LoweredStep, value: NamedTensor) -> Iterator[tuple[str, int, int]]:
    """Yield (buffer, first element, number of elements) of each piece of a state tensor."""
    remaining = value.elements
    for ref in value.pieces:
        count = min(remaining, step.buffers[ref.buffer].elements - ref.offset)
        yield ref.buffer, ref.offset, count
        remaining -= count


def load_generation(folder: str | Path) -> dict[str, Any]:
    """Load the key ``generation`` of the manifest of an exported folder.

    Raises
    ------
    InputError
        If the folder has no manifest of an export, or no generations.
    """
    path = Path(folder) / _MANIFEST
    text = read_text(path)
    with raised_as(InputError, f"migrate_from: {path}"):
        document = parse_json(text, expected="manifest of an export")
        if not isinstance(document, dict) or document.get("format") != "poetmodel-export":
            raise InputError("expected the manifest of a folder that poetmodel export made")
        source = document.get("generation")
        if not isinstance(source, dict) or any(key not in source for key in _KEYS):
            reason = "does not describe" if document.get("commit") else "has no commits and no"
            raise InputError(
                f"{reason} generations on storage; name a folder that was exported with commit, by "
                "this version (the same command gives the same state)"
            )
        return source


def match_state(step: LoweredStep, source: Mapping[str, Any]) -> Migration:
    """Match the state of a step with that of another step by name, shape and type.

    Raises
    ------
    InputError
        If no state matches.
    """
    graph, states = step.graph, source["states"]
    replaced = {graph.tensors[old].name for old in graph.replacement_of}
    # Only updated state is in generations; other state is in the exported code.
    updated_states = [v for v in step.states if all(ref.buffer in replaced for ref in v.pieces)]
    migrated_states = [value for value in updated_states if _matches(value, states.get(value.name))]
    if not migrated_states:
        raise InputError(
            f"migrate_from: {step.graph.name} has no state of the same name, shape and type as "
            f"{listed(sorted(states))} of the other folder"
        )
    names = {value.name for value in migrated_states}
    return Migration(
        source=source,
        pieces=tuple(
            piece for v in migrated_states for piece in _piece_copies(step, v, states[v.name])
        ),
        migrated=tuple(v.name for v in updated_states if v.name in names),
        reset=tuple(v.name for v in updated_states if v.name not in names),
        dropped=tuple(name for name in states if name not in names),
    )


def _matches(value: NamedTensor, other: Mapping[str, Any] | None) -> bool:
    return other is not None and (list(value.shape), str(value.type)) == (
        other["shape"],
        other["dtype"],
    )


def _piece_copies(
    step: LoweredStep, value: NamedTensor, other: Mapping[str, Any]
) -> Iterator[CarriedPiece]:
    """Yield the copies for a tensor: one for each pair of overlapping pieces of the two steps."""
    own_pieces = _with_starts([(name, offset, n) for name, offset, n in state_pieces(step, value)])
    earlier_pieces = _with_starts([(tensor, offset, n) for tensor, offset, n in other["pieces"]])
    for begin, name, offset, count in own_pieces:
        for start, tensor, source_offset, size in earlier_pieces:
            low, high = max(begin, start), min(begin + count, start + size)
            if low < high:
                yield CarriedPiece(
                    buffer=name,
                    first=offset + low - begin,
                    count=high - low,
                    tensor=tensor,
                    offset=source_offset + low - start,
                )


def _with_starts(pieces: Sequence[tuple[Any, int, int]]) -> list[tuple[int, Any, int, int]]:
    """Return pieces as (first element in the whole tensor, name or index, offset, count)."""
    begin, positioned = 0, []
    for name, offset, count in pieces:
        positioned.append((begin, name, offset, count))
        begin += count
    return positioned
