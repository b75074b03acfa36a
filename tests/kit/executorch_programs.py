"""Networks that tests export to ExecuTorch, and their training in its runtime."""

import re
import warnings
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from mcu import networks

STEPS = 20
"""Number of training steps of every program."""
SGD = {"lr": 0.05, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}
"""Settings of the optimizer of every program."""


def cnn(batch=4):
    """Return a convolutional network with batch norm and max pooling, its loss and inputs."""

    def block(into, out):
        return [nn.Conv2d(into, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU()]

    model = nn.Sequential(
        *block(3, 8), *block(8, 8), nn.MaxPool2d(2), *block(8, 16), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip
    inputs = (torch.randn(batch, 3, 16, 16), torch.randint(0, 10, (batch,)))
    return model, functional.cross_entropy, inputs


NETWORKS = {
    "mlp": partial(networks.mlp, 32),
    "cnn": cnn,
    "resnet8": networks.resnet8,
    "ds-cnn": networks.ds_cnn,
    "bert-block": partial(networks.bert, 4),
}
"""Functions by name of the network; each returns a model, its loss and inputs."""


def train(program, inputs):
    """Train a program for `STEPS` steps in ExecuTorch's runtime; return its tensors by name.

    They are "losses" of all steps, "gradient ..." of the last step, and final "weight ...".
    """
    from executorch.extension.training import _load_for_executorch_for_training_from_buffer as load
    from executorch.extension.training import get_sgd_optimizer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the API is experimental
        step, optimizer, losses, gradients = load(program), None, [], {}
        for number in range(STEPS):
            batch = _make_batch(inputs, number)
            losses += step.forward_backward("forward", batch)
            gradients = step.named_gradients()
            if optimizer is None:
                optimizer = get_sgd_optimizer(step.named_parameters(), **SGD)
            optimizer.step(gradients)
    weights = {f"weight {key}": value.clone() for key, value in step.named_parameters().items()}
    return {
        "losses": torch.stack([loss.reshape(()) for loss in losses]),
        **{f"gradient {key}": value.clone() for key, value in gradients.items()},
        **weights,
    }


def _make_batch(inputs, number):
    """Return batch `number`: inputs with noise, and integers such as labels in another order.

    Seeds the default generator of PyTorch.
    """
    torch.manual_seed(number)
    return tuple(
        value + 0.1 * torch.randn_like(value)
        if value.is_floating_point()
        else value.flatten()[torch.randperm(value.numel())].reshape(value.shape)
        for value in inputs
    )


def parse_sufficient_budget(sentence):
    """Return the budget, in digits, that an error message about a too small one suggests.

    Raises ValueError if `sentence` has none.
    """
    found = re.search(r"ram=(\d+)", sentence)
    if found is None:
        raise ValueError(sentence)
    return found[1]
