"""Options that several ways into PyTorch share: their types, and one check of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from poetmodel.device import Device
from poetmodel.errors import quote

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_SWITCH: Final = ("True or False", bool)
_EXPECTED: Final[dict[str, tuple[str, Any]]] = {
    "device": ("a device or its name", str | Device | None),
    "storage": ("a folder", str | Path | None),
    "cache": ("a folder, True or False", str | Path | bool),
    "on_progress": ("a function", Callable | None),
    "loss_only": _SWITCH,
    "add_gradients": _SWITCH,
    "recompute": _SWITCH,
    "rollback": _SWITCH,
    "paging": ("True, False or None", bool | None),
}
"""(description, type) of each option."""
_PYTORCH_DEVICES: Final = ("cpu", "cuda", "meta", "mps", "xpu")
"""Names of devices of PyTorch that users may confuse with devices of this package."""


def type_errors(options: Mapping[str, object]) -> Iterator[str]:
    """Yield an error for each shared option of another type, and for a device of PyTorch."""
    for name, (expected, expected_type) in _EXPECTED.items():
        value = options.get(name)
        if name in options and (not isinstance(value, expected_type) or value == ""):
            yield f"{name}: expected {expected}, got {quote(value)}"
    if str(options.get("device")).partition(":")[0] in _PYTORCH_DEVICES:
        yield (
            f"device: {quote(options['device'])} is a device of PyTorch; expected a board or a "
            "card that times are estimated for, such as rpi4b, a100 or a file *.toml; leave it out "
            "for this machine"
        )
