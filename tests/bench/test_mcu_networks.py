"""Networks for microcontrollers: what was published of them, and that they can be traced."""

import pytest

from poetmodel.graph import zoo

pytest.importorskip("torch")

from mcu.networks import NETWORKS, forward_macs, parameters
from poetmodel.torch import trace

pytestmark = pytest.mark.torch

IN_ZOO = {
    "resnet8": zoo.resnet8,
    "mobilenetv1-vww": zoo.mobilenetv1_vww,
    "ds-cnn": zoo.ds_cnn,
    "autoencoder": zoo.autoencoder,
    "mobilenetv2-035": zoo.mobilenetv2_035,
    "mlp": zoo.mlp,
    "bert-block": lambda: zoo.transformer(
        seq_len=16, hidden=32, heads=2, feedforward=128, vocabulary=64
    ),
    "encoder-layer": lambda: zoo.transformer(
        seq_len=16, hidden=32, heads=2, feedforward=128, vocabulary=64
    ),
}
"""The same networks as graphs, whose figures are held against publications."""


@pytest.mark.parametrize("name", IN_ZOO)
def test_networks_are_those_of_the_zoo(name):
    """Parameters and multiply-accumulates of a sample are those of the zoo's graph."""
    training, graph = NETWORKS[name](), IN_ZOO[name]()
    assert parameters(training) == graph.parameters
    assert forward_macs(training) == graph.forward_macs * len(training[2][0])


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("lenet", 61_706),  # LeNet-5 with all maps of its second layer connected
        ("m5", 26_915),  # the figure of PyTorch's speech command tutorial
        ("vit-block", 49 * 32 + 18 * 32 + 3 * 2 * 32 + 4 * 33 * 32 + 64 * 33 + 32 * 65 + 10 * 33),
    ],
)
def test_published_parameters(name, count):
    """Networks that the zoo has not got have as many parameters as published, or as layers say."""
    assert parameters(NETWORKS[name]()) == count


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_is_traced(name):
    """A training step of each is captured; all its parameters have gradients."""
    model, loss_fn, inputs = NETWORKS[name]()
    graph = trace(model, loss_fn, inputs, name=name).graph
    assert graph.resident_bytes["gradients"] == 4 * sum(p.numel() for p in model.parameters())
