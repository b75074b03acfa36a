"""What compiling shows while it runs: its stage on a terminal, and nothing elsewhere."""

from __future__ import annotations

import io

import pytest

torch = pytest.importorskip("torch")

import poetmodel.torch as pmt  # noqa: E402

pytestmark = pytest.mark.torch


class Terminal(io.StringIO):
    """What is written to a terminal, or to a pipe."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        """Return which of the two it is."""
        return self.is_terminal


@pytest.mark.parametrize("is_terminal", [True, False])
def test_stages_are_shown_on_a_terminal_only(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stage has its turn; a pipe gets nothing."""
    stderr = Terminal(is_terminal=is_terminal)
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
