"""Migration: the state that a step reads from the storage of an earlier export."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from poetmodel.errors import InputError, convert_errors, join_names
from poetmodel.export.manifest import MANIFEST, Generation, describe_samples, load_manifest
from poetmodel.lowered.calls import Ref
from poetmodel.lowered.ranges import Indices

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from poetmodel.export.manifest import GenerationState, StoredSamples
    from poetmodel.export.replay import Replay
    from poetmodel.lowered.calls import NamedTensor
    from poetmodel.lowered.step import LoweredStep


@dataclass(frozen=True, slots=True, kw_only=True)
class MigratedPiece:
    """Elements of a buffer that are copied from a tensor of the earlier generation."""

    buffer: str
    buffer_offset: int
    """First element in the buffer."""
    count: int
    """Number of elements."""
    tensor_index: int
    """Index of the tensor in the earlier generation."""
    tensor_offset: int
    """First element in the tensor of the earlier generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """The state that a step reads from a generation of another step."""

    source: Generation
    """Layout of the generations of the other step."""
    pieces: tuple[MigratedPiece, ...]
    migrated: tuple[str, ...]
    """Updated state tensors with the same name, shape and type in the other step."""
    reset: tuple[str, ...]
    """State without a match in the other step, among the state that this step updates; it has its
    initial values."""
    dropped: tuple[str, ...]
    """State of the other step without a match in this step."""
    takes_samples: bool = False
    """Whether stored samples of the other step are samples of this step."""


def load_generation_layout(folder: str | Path) -> Generation:
    """Load the layout of an exported folder's generations; raise `InputError` if it has none."""
    with convert_errors(InputError, "migrate_from"):
        document = load_manifest(folder)
    with convert_errors(InputError, f"migrate_from: {Path(folder) / MANIFEST}"):
        try:
            return Generation.model_validate(document.get("generation"))
        except ValidationError:
            reason = "does not describe" if document.get("commit") else "has no commits and no"
            raise InputError(
                f"{reason} generations on storage; name a folder that was exported with commit, by "
                "this version: export the earlier step again, its state has the same layout"
            ) from None


def match_samples(samples: StoredSamples | None, earlier: StoredSamples | None) -> bool:
    """Return whether every stored sample of `earlier` is valid for `samples`; False for None."""
    if samples is None or earlier is None or samples.identity != earlier.identity:
        return False
    rows, earlier_rows = (
        [
            Indices(
                ref=Ref(str(number), first),
                shape=tuple(shape),
                low=low,
                high=high,
                ignored=ignored,
            )
            for number, first, shape, low, high, ignored in described.indices
        ]
        for described in (samples, earlier)
    )
    return all(any(known.implies(row) for known in earlier_rows) for row in rows)


def match_state(step: LoweredStep, source: Generation, replay: Replay | None) -> Migration:
    """Match the updated state of a step with that of another step by name, shape and type.

    `source` is the result of `load_generation_layout` for the other step. Also matches the samples
    of `replay`. Raises `InputError` if no updated state matches.
    """
    graph, states = step.graph, source.states
    replaced_names = {graph.tensors[old].name for old in graph.replacement_of}
    # Only updated state is in generations; other state is in the exported code.
    updated_states = [
        tensor
        for tensor in step.states
        if all(ref.buffer in replaced_names for ref in tensor.pieces)
    ]
    migrated_states = [
        tensor for tensor in updated_states if _matches(tensor, states.get(tensor.name))
    ]
    if not migrated_states:
        raise InputError(
            f"migrate_from: {step.graph.name} has no state of the same name, shape and type as "
            f"{join_names(sorted(states))} of the other folder"
        )
    names = {tensor.name for tensor in migrated_states}
    return Migration(
        source=source,
        pieces=tuple(
            piece
            for tensor in migrated_states
            for piece in _find_piece_copies(step, tensor, states[tensor.name])
        ),
        migrated=tuple(tensor.name for tensor in updated_states if tensor.name in names),
        reset=tuple(tensor.name for tensor in updated_states if tensor.name not in names),
        dropped=tuple(name for name in states if name not in names),
        takes_samples=match_samples(describe_samples(step, replay), source.samples),
    )


def _matches(tensor: NamedTensor, earlier_entry: GenerationState | None) -> bool:
    return earlier_entry is not None and (list(tensor.shape), str(tensor.type)) == (
        earlier_entry.shape,
        earlier_entry.dtype,
    )


def _find_piece_copies(
    step: LoweredStep, tensor: NamedTensor, earlier_entry: GenerationState
) -> Iterator[MigratedPiece]:
    """Yield the copies for a tensor: one for each pair of overlapping pieces of the two steps."""
    own_pieces = _add_starts(
        [(buffer, offset, count) for buffer, offset, count in step.list_pieces(tensor)]
    )
    earlier_pieces = _add_starts(
        [(index, offset, count) for index, offset, count in earlier_entry.pieces]
    )
    for own_start, buffer, own_offset, own_count in own_pieces:
        for earlier_start, index, earlier_offset, earlier_count in earlier_pieces:
            begin = max(own_start, earlier_start)
            end = min(own_start + own_count, earlier_start + earlier_count)
            if begin < end:
                yield MigratedPiece(
                    buffer=buffer,
                    buffer_offset=own_offset + begin - own_start,
                    count=end - begin,
                    tensor_index=index,
                    tensor_offset=earlier_offset + begin - earlier_start,
                )


def _add_starts(pieces: Sequence[tuple[Any, int, int]]) -> list[tuple[int, Any, int, int]]:
    """Return (first element in the whole tensor, name or index, offset, count) of each piece."""
    start, pieces_with_starts = 0, []
    for name, offset, count in pieces:
        pieces_with_starts.append((start, name, offset, count))
        start += count
    return pieces_with_starts
