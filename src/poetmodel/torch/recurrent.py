"""Recurrent layers: what a capture needs so that it gives what eager does."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


@contextmanager
def captured_recurrence(model: torch.nn.Module) -> Iterator[None]:
    """Let the LSTM layers of a model be captured.

    Notes
    -----
    The LSTM of oneDNN has a backward that cannot be captured: it is off inside.
    """
    import torch

    before = torch.backends.mkldnn.enabled
    if any(isinstance(module, torch.nn.LSTM) for module in model.modules()):
        torch.backends.mkldnn.enabled = False
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before
