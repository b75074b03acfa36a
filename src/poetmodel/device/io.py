"""Device files, ``*.toml``, and which of them are shipped; profiles are next door.

The range of each figure is checked by `poetmodel.device.hardware`; this module adds what only a
file can get wrong: syntax, unknown keys, tables that are none.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from poetmodel.data import read_text, shipped
from poetmodel.device.hardware import Compute, Device, Storage, StorageMode, Transfer
from poetmodel.device.profile import load_profile, save_profile
from poetmodel.errors import DeviceError, InputError, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["device_names", "load_device", "load_profile", "save_profile"]

_DEVICE_KEYS: Final = ("name", "core", "ram_bytes", "aux_bytes", "idle_power_w", "source")
_TABLES: Final = ("compute", "storage")
_COMPUTE_KEYS: Final = ("flops_per_s", "power_w", "flops_per_j", "bytes_per_s")
_STORAGE_KEYS: Final = ("mode", "page_in", "page_out")
_TRANSFER_KEYS: Final = ("latency_s", "bytes_per_s", "power_w")
_SUFFIX: Final = ".toml"


def device_names() -> tuple[str, ...]:
    """Return the names of the shipped devices, sorted."""
    return tuple(sorted(path.stem for path in shipped("devices").glob(f"*{_SUFFIX}")))


def load_device(name_or_path: str | Path) -> Device:
    """Read a shipped device or a ``*.toml`` file.

    Parameters
    ----------
    name_or_path : str or Path
        A name of `device_names`, or the path of a file.

    Returns
    -------
    Device
        With its `key`: the name or path as given.

    Raises
    ------
    DeviceError
        If there is no such device or file; with every fault found in the file.
    """
    key = str(name_or_path)
    names = device_names()
    if key in names:
        path = shipped("devices") / f"{key}{_SUFFIX}"
    elif _is_path(key):
        path = Path(key)
    else:
        raise DeviceError(_unknown(key, names))
    try:
        text = read_text(path)
    except InputError as error:
        raise DeviceError(error.faults) from None
    try:
        return _device(_parse(text), key=key)
    except DeviceError as error:
        raise error.within(key) from None


def _is_path(key: str) -> bool:
    separators = {os.sep, os.altsep} - {None}
    if key.endswith(_SUFFIX) or any(separator in key for separator in separators if separator):
        return True
    try:
        return Path(key).is_file()
    except OSError:
        return False


def _unknown(key: str, names: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(key.lower(), names, n=3)
    hint = f" (did you mean {' or '.join(close)}?)" if close else ""
    return (
        f"device {shown(key)}: there is no such device{hint}; shipped are {', '.join(names)}; "
        f"else give the path of a {_SUFFIX} file"
    )


def _parse(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        msg = f"not valid TOML ({error})"
        raise DeviceError(msg) from None
    except RecursionError:
        msg = "its TOML is nested too deeply to be a device file"
        raise DeviceError(msg) from None
    except ValueError:  # an integer with more digits than Python reads
        msg = "it holds a number with too many digits"
        raise DeviceError(msg) from None


def _device(document: dict[str, Any], *, key: str) -> Device:
    faults: list[str] = _unknown_keys(document, (*_DEVICE_KEYS, *_TABLES), "")
    compute = _table(document, "compute", "compute", faults)
    faults += _unknown_keys(compute, _COMPUTE_KEYS, "[compute] ")
    figures = {name: document[name] for name in _DEVICE_KEYS if name in document}
    figures |= {name: document.get(name) for name in ("name", "ram_bytes")}
    storage = _storage(document, faults) if "storage" in document else None
    try:
        device = Device(
            compute=Compute(
                flops_per_s=compute.get("flops_per_s"),  # type: ignore[arg-type]
                **{name: compute.get(name) for name in _COMPUTE_KEYS[1:]},
            ),
            storage=storage,
            key=key,
            **figures,
        )
    except DeviceError as error:
        raise DeviceError([*faults, *error.faults]) from None
    if faults:
        raise DeviceError(faults)
    return device


def _storage(document: dict[str, Any], faults: list[str]) -> Storage:
    storage = _table(document, "storage", "storage", faults)
    faults += _unknown_keys(storage, _STORAGE_KEYS, "[storage] ")
    ways = {}
    for name in ("page_in", "page_out"):
        where = f"storage.{name}"
        way = _table(storage, name, where, faults)
        faults += _unknown_keys(way, _TRANSFER_KEYS, f"[{where}] ")
        ways[name] = Transfer(**{key: way.get(key) for key in _TRANSFER_KEYS})  # type: ignore[arg-type]
    mode = storage.get("mode")
    known = {str(member): member for member in StorageMode}
    return Storage(mode=known.get(mode, mode) if isinstance(mode, str) else mode, **ways)  # type: ignore[arg-type]


def _table(owner: Mapping[str, Any], key: str, where: str, faults: list[str]) -> dict[str, Any]:
    """Return a table of the file; one that is missing is empty, and its keys are then missed."""
    table = owner.get(key, {})
    if isinstance(table, dict):
        return table
    faults.append(f"[{where}]: expected a table, got {shown(table)}")
    return {}


def _unknown_keys(table: Mapping[str, Any], known: tuple[str, ...], where: str) -> list[str]:
    faults = []
    for key in table:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"accepted are {', '.join(known)}"
            faults.append(f"{where}{key}: unknown key; {hint}")
    return faults
