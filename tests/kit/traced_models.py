"""Small training steps of many kinds; needs PyTorch.

A step is a model, a loss function and inputs, of which the last is the target.
"""

from functools import cache

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from poetmodel.torch import trace


class FunctionModule(nn.Module):
    """A module that calls `function` with its submodules and its inputs.

    The first argument of `function` is the list of `parts` or, with `named` ones, the module.
    """

    def __init__(self, function, *parts, **named):
        super().__init__()
        self.function, self.named = function, bool(named)
        for name, part in (named or {"parts": nn.ModuleList(parts)}).items():
            setattr(self, name, part)

    def forward(self, *inputs):
        """Return the function's result."""
        return self.function(self if self.named else self.parts, *inputs)


class Square(torch.autograd.Function):
    """A square with a user-defined backward pass."""

    @staticmethod
    def forward(ctx, x):
        """Return the square."""
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        """Return the gradient of x."""
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class Residual(nn.Module):
    """A block of convolution and batch norm whose input is added to its output."""

    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)

    def forward(self, x):
        """Return the block's output."""
        return functional.relu(self.bn(self.conv(x)) + x)


def residual():
    """Return a step of convolution, residual block, dropout and classifier."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), Residual(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(64, 3)
    )
    return model, functional.cross_entropy, (torch.randn(2, 3, 4, 4), torch.tensor([0, 2]))


@cache
def trace_residual():
    """Trace the step of `residual` once, for all tests that do not change it."""
    return trace(*residual(), measure_workspace=False)


def row_step(*parts, by=None):
    """Return a step on 3 rows of 4 numbers.

    The model is the sequence of `parts`, or `by(parts, x)`.
    """
    model = nn.Sequential(*parts) if by is None else FunctionModule(by, *parts)
    return model, functional.mse_loss, (torch.randn(3, 4), torch.randn(3, 4))


def image_step(model, size=4):
    """Return a step of `model` on images of 4 channels, 6 x 6.

    The target has 4 channels, `size` x `size`.
    """
    return model, functional.mse_loss, (torch.randn(2, 4, 6, 6), torch.randn(2, 4, size, size))


def frozen_step():
    """Return a step whose first layer is frozen."""
    step = row_step(nn.Linear(4, 4), nn.Linear(4, 4))
    step[0][0].requires_grad_(False)
    return step


def recurrent(cell):
    """Return a step of a recurrent layer on sequences of length 3."""
    model = FunctionModule(lambda parts, x: parts[0](x)[0], cell)
    return model, functional.mse_loss, (torch.randn(2, 3, 4), torch.randn(2, 3, 4))


def attention(dropout_p):
    """Return a step of scaled dot product attention."""

    def attend(parts, x):
        return functional.scaled_dot_product_attention(
            parts[0](x), parts[1](x), x, dropout_p=dropout_p
        )

    model = FunctionModule(attend, nn.Linear(8, 8), nn.Linear(8, 8))
    return model, functional.mse_loss, (torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8))


def checkpointed_step():
    """Return a step with modules under `torch.utils.checkpoint`."""
    inner = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 4))
    return row_step(
        inner, nn.Linear(4, 4), by=lambda p, x: p[1](checkpoint(p[0], x, use_reentrant=False))
    )


def chunks():
    """Return a step whose output is split and concatenated."""

    def cut(parts, x):
        pieces = parts[0](x).chunk(2, -1)
        return torch.cat([piece * (k + 1) for k, piece in enumerate(pieces)], -1)

    return row_step(nn.Linear(4, 4), by=cut)


def autocast():
    """Return a step with a linear layer under autocast to bfloat16."""

    def low(parts, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = parts[0](x)
        return y.float()

    return row_step(nn.Linear(4, 4), by=low)


def channels_last():
    """Return a step of a convolution and batch norm in the channels-last layout."""
    step = image_step(nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)))
    x, y = step[2]
    layout = torch.channels_last
    return step[0].to(memory_format=layout), step[1], (x.to(memory_format=layout), y)


def nested_step():
    """Return a step with inputs in a dictionary and a tuple."""
    model = FunctionModule(lambda p, d: p[0](d["a"]) + d["b"][0], nn.Linear(4, 4))
    inputs = {"a": torch.randn(3, 4), "b": (torch.randn(3, 4),)}
    return model, functional.mse_loss, (inputs, torch.randn(3, 4))


def hooked_step():
    """Return a step whose modules have a forward hook, and one for the gradient of an output."""
    step = row_step(nn.Linear(4, 4), nn.BatchNorm1d(4))
    step[0][0].register_forward_hook(lambda _module, _inputs, output: output * 2)
    step[0][1].register_forward_hook(
        lambda _module, _inputs, output: (
            output.register_hook(lambda gradient: gradient * 10) and None
        )
    )
    return step


def unread_draw_step(draw):
    """Return a step that draws random numbers by `draw`, does not read them, and then drops out."""

    def forward(parts, x):
        x = parts[0](x)
        draw(x)
        return functional.dropout(x, 0.25)

    return row_step(nn.Linear(4, 4), by=forward)


def shared_gradient():
    """Return a step in which two weights have one gradient, in the same memory."""
    parts = (nn.Linear(4, 3, bias=False), nn.Linear(4, 3, bias=False))
    return row_step(*parts, by=lambda p, x: x + p[0].weight + p[1].weight)


def transposed_gradient():
    """Return a step in which the layout of a weight's gradient differs from the weight's."""
    return row_step(nn.Linear(3, 4, bias=False), by=lambda p, x: x + p[0].weight.t())


STEPS = {
    "residual": residual,
    "frozen": frozen_step,
    "hooks": hooked_step,
    "unread dropout": lambda: unread_draw_step(functional.dropout),
    "unread noise": lambda: unread_draw_step(torch.randn_like),
    "unread rrelu": lambda: unread_draw_step(lambda x: functional.rrelu(x, training=True)),
    "unused": lambda: row_step(nn.Linear(4, 4), nn.Linear(4, 4), by=lambda p, x: p[0](x)),
    "encoder layer": lambda: (
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        functional.mse_loss,
        (torch.randn(2, 5, 8), torch.randn(2, 5, 8)),
    ),
    "group norm": lambda: image_step(nn.Sequential(nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4))),
    "depthwise": lambda: image_step(nn.Conv2d(4, 4, 3, groups=4)),
    "channels last": channels_last,
    "checkpoint": checkpointed_step,
    "randn": lambda: row_step(nn.Linear(4, 4), by=lambda p, x: p[0](x + torch.randn_like(x))),
    "chunks": chunks,
    "custom function": lambda: row_step(nn.Linear(4, 4), by=lambda p, x: Square.apply(p[0](x))),
    "spectral norm": lambda: row_step(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))),
    "weight norm": lambda: row_step(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))),
    "attention": lambda: attention(0.0),
    "attention with dropout": lambda: attention(0.2),
    "gru": lambda: recurrent(nn.GRU(4, 4, batch_first=True)),
    "deep gru": lambda: recurrent(nn.GRU(4, 2, 3, dropout=0.3, bidirectional=True)),
    "deep rnn": lambda: recurrent(nn.RNN(4, 4, 2, dropout=0.3)),
    "rnn": lambda: recurrent(nn.RNN(4, 4, nonlinearity="relu")),
    "margin loss": lambda: (
        nn.Linear(4, 4),
        functional.multi_margin_loss,
        (torch.randn(3, 4), torch.tensor([0, 1, 3])),
    ),
    "margin loss of labels": lambda: (
        nn.Linear(4, 4),
        functional.multilabel_margin_loss,
        (torch.randn(3, 4), torch.tensor([[0, 2, -1, 0], [1, -1, 0, 0], [3, 0, 1, -1]])),
    ),
    "loss inside": lambda: (
        FunctionModule(lambda p, x: p[0](x).sum(), nn.Linear(4, 4)),
        None,
        (torch.randn(3, 4),),
    ),
    "bfloat16": lambda: row_step(
        nn.Linear(4, 4, dtype=torch.bfloat16), by=lambda p, x: p[0](x.bfloat16()).float()
    ),
    "autocast": autocast,
    "nested inputs": nested_step,
    "a number among the inputs": lambda: (
        FunctionModule(lambda p, x, k: p[0](x) * k, nn.Linear(4, 4)),
        functional.mse_loss,
        (torch.randn(3, 4), 3, torch.randn(3, 4)),
    ),
    "evaluation mode": lambda: image_step(
        nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.Dropout()).eval()
    ),
    "a parameter as it is": lambda: row_step(nn.Linear(4, 3), by=lambda p, x: x + p[0].weight),
    "one gradient for two": shared_gradient,
    "a transposed gradient": transposed_gradient,
    "a literal tensor": lambda: row_step(
        nn.Linear(4, 4), by=lambda p, x: p[0](x) * torch.tensor([1.0, 2.0, 3.0, 4.0])
    ),
}
"""Functions that return steps, by name; each step must have the bits of eager PyTorch."""

QUICK_STEPS = (
    "residual", "frozen", "hooks", "encoder layer", "custom function", "attention with dropout",
    "autocast", "nested inputs", "one gradient for two", "unread dropout", "unread rrelu",
    "margin loss", "margin loss of labels",
)  # fmt: skip
"""Names of the steps of quick tests."""
