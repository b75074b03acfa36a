"""Recurrent layers: what a capture needs so that it gives what eager does."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from poetmodel.torch.failures import CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch


@contextmanager
def captured_recurrence(name: str, model: torch.nn.Module) -> Iterator[None]:
    """Let recurrent layers be captured as eager runs them, as far as that can be had.

    Parameters
    ----------
    name : str
        What messages call the step.
    model : Module
        What is captured.

    Raises
    ------
    CaptureError
        If PyTorch captures a layer without its dropout, and that cannot be helped.

    Notes
    -----
    The LSTM of oneDNN has a backward that cannot be captured: it is off inside. The decomposition
    of all recurrent layers tests ``num_layers < i - 1`` where it should test ``i``, and so
    never draws the dropout between layers; here each layer is decomposed alone, and dropout is put
    between them.
    """
    import torch
    from torch._decomp import decompositions

    layers = [module for module in model.modules() if isinstance(module, torch.nn.RNNBase)]
    original = getattr(decompositions, "_rnn_helper", None)
    if original is None and any(layer.dropout and layer.training for layer in layers):
        msg = (
            f"{name}: this release of PyTorch captures recurrent layers without the dropout "
            "between their layers; set dropout=0, or stack single layers with nn.Dropout"
        )
        raise CaptureError(msg)
    before = torch.backends.mkldnn.enabled
    if any(isinstance(layer, torch.nn.LSTM) for layer in layers):
        torch.backends.mkldnn.enabled = False
    if original is not None:
        decompositions._rnn_helper = _layer_by_layer(original)  # noqa: SLF001 - see Notes
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before
        if original is not None:
            decompositions._rnn_helper = original  # noqa: SLF001 - as above


def _layer_by_layer(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the decomposition of a stack of recurrent layers, with the dropout between them."""

    def stacked(
        x: torch.Tensor,
        hidden: Sequence[Any],
        params: Sequence[Any],
        has_biases: bool,  # noqa: FBT001
        num_layers: int,
        dropout: float,
        train: bool,  # noqa: FBT001
        bidirectional: bool,  # noqa: FBT001
        batch_first: bool,  # noqa: FBT001
        layer_fn: Callable[..., Any],
    ) -> tuple[torch.Tensor, list[Any]]:
        import torch

        x = x.transpose(0, 1) if batch_first else x
        width = 2 if bidirectional else 1
        final: list[Any] = []
        for layer in range(num_layers):
            own = slice(layer * width, (layer + 1) * width)
            x, last = original(
                x,
                hidden[own],
                params[own],
                has_biases,
                1,
                0.0,
                train,
                bidirectional,
                False,  # noqa: FBT003
                layer_fn,
            )
            final += last
            if train and dropout and layer < num_layers - 1:
                x = torch.dropout(x, dropout, train=True)
        return (x.transpose(0, 1) if batch_first else x), final

    return stacked
