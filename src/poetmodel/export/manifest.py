"""``manifest.json`` of an exported folder: reading it, and its layout of generations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel, ConfigDict

from poetmodel.errors import InputError, convert_errors
from poetmodel.files import parse_json, read_text
from poetmodel.headers import check_version
from poetmodel.lowered.ranges import find_input_indices

if TYPE_CHECKING:
    from poetmodel.export.replay import Replay
    from poetmodel.lowered.step import LoweredStep

MANIFEST: Final = "manifest.json"
"""Name of the manifest in an exported folder."""
FORMAT: Final = "poetmodel-export"
VERSION: Final = 1
"""Version of the format of manifests."""


class _Entry(BaseModel):
    """An object of the manifest; keys of later versions are ignored."""

    model_config = ConfigDict(strict=True, frozen=True)


class StoredSamples(_Entry):
    """Identity and size of stored samples, and the permitted indices in them."""

    identity: str
    count: int
    sample_bytes: int
    indices: list[list[Any]]
    """Input, first element, shape, lower limit, upper limit and ignored index of each check."""


class GenerationState(_Entry):
    """A state tensor whose pieces are all in a generation."""

    shape: list[int]
    dtype: str
    pieces: list[list[int]]
    """Tensor of the generation, first element and number of elements of each piece."""


class Generation(_Entry):
    """Layout of the generations of a step on storage: what a later step needs to read one."""

    step_id: str
    layout_id: str
    instance_id: str
    commit_unit: int
    commit_block: int
    checksums: bool
    generations: int
    best: bool
    samples: StoredSamples | None
    page_bytes: list[int]
    stored_bytes: int
    in_flash: bool
    tensor_bytes: list[int]
    states: dict[str, GenerationState]


def load_manifest(folder: str | Path) -> dict[str, Any]:
    """Load the manifest of an exported folder; raise `InputError` for another format or version."""
    path = Path(folder) / MANIFEST
    text = read_text(path)
    with convert_errors(InputError, str(path)):
        document = parse_json(text, expected="manifest of an export")
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise InputError("expected the manifest of a folder that poetmodel export made")
        check_version(document, (VERSION,))
        return document


def read_earlier_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of an earlier export in a folder; {} if missing, invalid or foreign."""
    try:
        document = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    is_ours = isinstance(document, dict) and document.get("format") == FORMAT
    return document if is_ours else {}


def describe_samples(step: LoweredStep, replay: Replay | None) -> StoredSamples | None:
    """Return identity and permitted indices of stored samples; None without `replay`."""
    if replay is None:
        return None
    numbers = {step.inputs[k].pieces[0].buffer: k for k in replay.front.inputs}
    found = {
        (numbers[source.ref.buffer], source.ref.offset, source.shape, source.low, source.high,
         source.ignored)
        for _, source in find_input_indices(step)
        if source.ref.buffer in numbers
    }  # fmt: skip
    return StoredSamples(
        identity=replay.front.identify(step),
        count=replay.max_samples,
        sample_bytes=replay.sample_bytes,
        indices=[[*row[:2], list(row[2]), *row[3:]] for row in sorted(found)],
    )
