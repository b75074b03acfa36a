"""Networks whose programs of ExecuTorch are trained in tests, and how they train."""

import re
import warnings
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from mcu import networks

STEPS = 20
"""How many steps both programs train for."""
SGD = {"lr": 0.05, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}
"""How they train."""


def cnn(batch=4):
    """Return a plain convolutional network with batch norm and max pooling."""

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
"""The networks by name."""


def trained(program, inputs):
    """Return losses, gradients and weights of a program after some steps in its runtime."""
    from executorch.extension.training import _load_for_executorch_for_training_from_buffer as load
    from executorch.extension.training import get_sgd_optimizer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is experimental
        step, optimizer, losses, gradients = load(program), None, [], {}
        for number in range(STEPS):
            batch = _batch(inputs, number)
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


def _batch(inputs, number):
    """Return another batch of such inputs for each number: the samples in another order."""
    torch.manual_seed(number)
    return tuple(
        value + 0.1 * torch.randn_like(value)
        if value.is_floating_point()
        else value.flatten()[torch.randperm(value.numel())].reshape(value.shape)
        for value in inputs
    )


def enough(sentence):
    """Return the budget that an error about one that is too small says is enough."""
    found = re.search(r"ram=(\d+)", sentence)
    if found is None:
        raise ValueError(sentence)
    return found[1]
