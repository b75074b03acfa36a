"""State files of exported programs: all state tensors one after the other, without a header.

``manifest.json`` of the exported folder lists the tensors in the order of the file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from poetmodel.errors import InputError, convert_errors
from poetmodel.export.manifest import MANIFEST, load_manifest
from poetmodel.files import read_bytes, write_bytes
from poetmodel.lowered.calls import DataType

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

STATE_FILE: Final = "state.bin"
"""Default name of the state file in an exported folder."""
_FILE_DTYPES: Final = {kind.numpy_name: kind.file_dtype for kind in DataType}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedTensor:
    """One state tensor of an exported step."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Element type on the device: ``float32``, ``int32``, ``uint8`` or ``int8``."""
    home: str
    """``ram``, ``storage``, ``mapped`` (memory-mapped storage) or ``flash``; several, joined by +,
    if its tiles differ."""

    @property
    def bytes(self) -> int:
        """Size on the device [B]."""
        return math.prod(self.shape) * np.dtype(_FILE_DTYPES[self.dtype]).itemsize


def load_state_tensors(
    folder: str | Path, *, requires_updates: bool = False
) -> tuple[ExportedTensor, ...]:
    """Load the state tensors from a folder's manifest, in the order of state files.

    `requires_updates` refuses a folder whose program updates no state.
    """
    document = load_manifest(folder)
    with convert_errors(InputError, str(Path(folder) / MANIFEST)):
        if requires_updates and not document.get("updates", True):
            raise InputError(
                "its program hands out gradients and changes no state, so that it has no file of "
                "state; export it with an optimizer"
            )
        try:
            return tuple(map(_parse_tensor, document["states"]))
        except (KeyError, TypeError, ValueError):
            raise InputError("states: expected name, shape, dtype and home of each") from None


def _parse_tensor(entry: Mapping[str, Any]) -> ExportedTensor:
    """Parse an entry of ``states`` in a manifest."""
    if entry["dtype"] not in _FILE_DTYPES:
        raise ValueError(entry["dtype"])
    shape = tuple(entry["shape"])
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(shape)
    return ExportedTensor(
        name=str(entry["name"]), shape=shape, dtype=entry["dtype"], home=str(entry["home"])
    )


def state_paths(path: str | Path, folder: str | Path | None) -> tuple[Path, Path]:
    """Return (state file, exported folder) for the path of a state file or of an exported folder.

    The folder of a state file is `folder`, by default its own; ``state.bin`` is the state file of a
    folder, for which `folder` is ignored.
    """
    path = Path(path)
    if path.is_dir():
        return path / STATE_FILE, path
    return path, path.parent if folder is None else Path(folder)


def read_state(path: Path, tensors: Sequence[ExportedTensor]) -> dict[str, np.ndarray]:
    """Read the read-only arrays of a state file, by name; raise `InputError` if it does not fit.

    For the file of a double-precision build, the arrays of float32 tensors have type float64.
    """
    data = read_bytes(path)
    real_bytes = sum(tensor.bytes for tensor in tensors if tensor.dtype == "float32")
    single_file_bytes = sum(tensor.bytes for tensor in tensors)
    double_file_bytes = single_file_bytes + real_bytes
    if len(data) not in {single_file_bytes, double_file_bytes}:
        raise InputError(
            f"{path}: expected {single_file_bytes:,} B, all state of its folder (or "
            f"{double_file_bytes:,} B from a double-precision build), got {len(data):,} B"
        )
    is_double = len(data) != single_file_bytes
    arrays, offset = {}, 0
    for tensor in tensors:
        dtype = np.dtype(
            "<f8" if is_double and tensor.dtype == "float32" else _FILE_DTYPES[tensor.dtype]
        )
        count = math.prod(tensor.shape)
        arrays[tensor.name] = np.frombuffer(data, dtype, count, offset).reshape(tensor.shape)
        offset += count * dtype.itemsize
    return arrays


def write_state(
    path: Path, tensors: Sequence[ExportedTensor], arrays: Mapping[str, np.ndarray]
) -> None:
    """Write a state file: the arrays of `tensors`, in order, cast; shapes are not checked."""
    contents = (
        arrays[tensor.name].astype(_FILE_DTYPES[tensor.dtype]).tobytes() for tensor in tensors
    )
    write_bytes(path, b"".join(contents))
