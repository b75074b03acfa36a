"""What compiling shows while it runs: its stage on a terminal, and nothing elsewhere."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch")

import poetmodel.torch as pmt  # noqa: E402
from kit.commands import Terminal  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(("stream", "is_terminal"), [(Terminal, True), (io.StringIO, False)])
def test_stages_are_shown_on_a_terminal_only(
    stream: Callable[[], io.StringIO], is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stage has its turn; a pipe gets nothing."""
    stderr = stream()
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    with pmt.compile(
        model, torch.nn.functional.mse_loss, (torch.ones(4, 8), torch.ones(4, 1)), ram="100%"
    ):
        shown = stderr.getvalue()
    assert bool(shown) == is_terminal
    if is_terminal:
        assert "comparing with eager" in shown
