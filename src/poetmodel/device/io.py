"""Device files, ``*.toml``: find the shipped ones, and read these and files of users.

`poetmodel.device.hardware` converts their content to devices.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from poetmodel.errors import DeviceError, convert_errors, quote, suggest_names
from poetmodel.files import parse_toml, read_text, shipped_folder

_SUFFIX: Final = ".toml"


def device_names() -> tuple[str, ...]:
    """Return the names of the shipped devices, sorted."""
    return tuple(sorted(path.stem for path in shipped_folder("devices").glob(f"*{_SUFFIX}")))


def read_device(key: str) -> dict[str, Any]:
    """Return the parsed content of a shipped device file, by short name, or of another, by path.

    A short name takes precedence. Raises `DeviceError` if there is no such readable TOML file.
    """
    names = device_names()
    if key in names:
        path = shipped_folder("devices") / f"{key}{_SUFFIX}"
    elif _is_path(key):
        path = Path(key)
    else:
        hint = suggest_names(key.lower(), names, max_names=3)
        hint_text = f" ({hint})" if hint else ""
        raise DeviceError(
            f"device {quote(key)}: there is no such device{hint_text}; shipped are "
            f"{', '.join(names)}; else give the path of a {_SUFFIX} file"
        )
    with convert_errors(DeviceError):
        text = read_text(path)
    with convert_errors(DeviceError, key):
        return parse_toml(text)


def _is_path(key: str) -> bool:
    """Return whether a key ends in ``.toml``, contains a separator, or is an existing file."""
    if key.endswith(_SUFFIX) or os.sep in key or (os.altsep and os.altsep in key):
        return True
    try:
        return Path(key).is_file()
    except OSError:
        return False
