"""PyTorch models with a loss and inputs, and their export to ONNX; needs PyTorch and onnx."""

import copy
import warnings

import torch
from torch import nn
from torch.nn import functional

from mcu.networks import NETWORKS, Reconstruction


class Recurrent(nn.Module):
    """A recurrent layer, and a linear layer that reads its output at the last step."""

    def __init__(self, layer, width):
        super().__init__()
        self.layer, self.out = layer, nn.Linear(width, 4)

    def forward(self, x):
        """Return the logits of each sequence."""
        return self.out(self.layer(x)[0][:, -1])


def recurrent(layer, width=8):
    """Return a step of a recurrent layer on sequences of 5 steps and 6 features."""
    inputs = (torch.randn(2, 5, 6), torch.tensor([1, 2]))
    return Recurrent(layer, width), functional.cross_entropy, inputs


def encoder():
    """Return a step of a transformer encoder of two layers, whose weights differ."""
    layers = [
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0) for _ in range(2)
    ]
    model = nn.Sequential(nn.Linear(8, 16), *layers, nn.Flatten(), nn.Linear(80, 3))
    return model, functional.cross_entropy, (torch.randn(2, 5, 8), torch.tensor([1, 2]))


def autoencoder():
    """Return a step of MLPerf Tiny's autoencoder, whose input is also the target."""
    model, _, (x,) = NETWORKS["autoencoder"](8)
    assert isinstance(model, Reconstruction)
    return model.network, functional.mse_loss, (x, x.clone())


MODELS = {
    "autoencoder": autoencoder,
    "ds-cnn": lambda: NETWORKS["ds-cnn"](2),
    "mobilenetv1-vww": lambda: NETWORKS["mobilenetv1-vww"](2),
    "resnet8": lambda: NETWORKS["resnet8"](2),
    "mobilenetv2-035": lambda: NETWORKS["mobilenetv2-035"](2),
    "mlp": lambda: NETWORKS["mlp"](2),
    "bert-block": lambda: NETWORKS["bert-block"](2),
    "unet": lambda: NETWORKS["unet"](2),
    "encoder": encoder,
    "GRU": lambda: recurrent(nn.GRU(6, 8, batch_first=True)),
    "GRU, two ways": lambda: recurrent(nn.GRU(6, 8, 2, batch_first=True, bidirectional=True), 16),
    "LSTM": lambda: recurrent(nn.LSTM(6, 8, 2, batch_first=True)),
    "RNN, relu": lambda: recurrent(nn.RNN(6, 8, batch_first=True, nonlinearity="relu")),
}
"""Functions by name; each returns a step. The first four networks are those of MLPerf Tiny."""


def make_training(name):
    """Return a step whose batch norms have random running statistics, in training mode.

    Seeds the default generator of PyTorch.
    """
    torch.manual_seed(0)
    model, loss, inputs = MODELS[name]()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return model.train(), loss, inputs


def export_onnx(model, x, path, **options):
    """Export a copy of a model for training to `path`.

    By default TorchScript exports it, with a dynamic batch size.
    """
    if not options.get("dynamo"):
        names = [f"x{k}" for k in range(len(x))]
        options = {
            "dynamo": False,
            "training": torch.onnx.TrainingMode.PRESERVE,
            "do_constant_folding": False,
            "input_names": names,
            "dynamic_axes": {name: {0: "batch"} for name in names},
            **options,
        }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(copy.deepcopy(model).eval(), x, str(path), **options)
