"""PyTorch itself: whether it is there, and new enough."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Final

from poetmodel.errors import BackendUnavailableError

LEAST: Final = "2.9"
"""Oldest release whose capture says what goes in and out."""


def require_torch() -> str:
    """Return the version of the installed PyTorch.

    Raises
    ------
    BackendUnavailableError
        If PyTorch is missing or older than `LEAST`.
    """
    from packaging.version import Version

    try:
        found = version("torch")
    except PackageNotFoundError:
        msg = (
            "PyTorch is not installed, and tracing needs it: pip install 'poetmodel[torch]' "
            f"(torch {LEAST} or newer)"
        )
        raise BackendUnavailableError(msg) from None
    if Version(found).release < Version(LEAST).release:
        msg = f"PyTorch {found} is too old: tracing needs torch {LEAST} or newer"
        raise BackendUnavailableError(msg)
    return found
