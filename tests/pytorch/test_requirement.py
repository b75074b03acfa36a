"""PyTorch is asked for in words where it is missing or too old."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import pytest

from poetmodel.errors import BackendUnavailableError
from poetmodel.torch import requirement


def test_missing_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without PyTorch the message says how to get it."""

    def missing(_: str) -> str:
        raise PackageNotFoundError

    monkeypatch.setattr(requirement, "version", missing)
    with pytest.raises(BackendUnavailableError, match=r"pip install 'poetmodel\[torch\]'"):
        requirement.require_torch()


@pytest.mark.parametrize("found", ["2.8.1", "1.13.0+cpu"])
def test_old_torch_is_refused(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that cannot capture is named with the one that is needed."""
    monkeypatch.setattr(requirement, "version", lambda _: found)
    with pytest.raises(BackendUnavailableError, match=f"{found[:3]}.* too old.*2.9"):
        requirement.require_torch()


@pytest.mark.parametrize("found", ["2.9.0", "2.13.0+cpu", "3.0.0a1"])
def test_new_torch_is_accepted(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds and later releases count as what they are."""
    monkeypatch.setattr(requirement, "version", lambda _: found)
    assert requirement.require_torch() == found


def test_importing_the_front_end_does_not_import_torch() -> None:
    """PyTorch loads when something is captured, not before."""
    script = (
        "import sys, poetmodel.torch as front\n"
        "assert set(front.__all__) <= set(dir(front))\n"
        "[getattr(front, name) for name in front.__all__]\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "False\n"


def test_unknown_names_are_attribute_errors() -> None:
    """A name that is not there is an ordinary attribute error."""
    import poetmodel.torch as front

    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = front.nothing
