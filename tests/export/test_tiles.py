"""Tiles: a parameter in pieces trains as the whole one does, in less RAM at once."""

from itertools import pairwise, product

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from kit.kernel_calls import Memory
from kit.rotation import rotating
from kit.traced_models import Through
from poetmodel.errors import InputError
from poetmodel.export.exporting import in_tiles
from poetmodel.export.step import Ref
from poetmodel.export.tiles import tiled
from poetmodel.graph import Phase, floor
from poetmodel.torch.lowering.step import lower

OPTIMIZERS = {
    "sgd": lambda found: torch.optim.SGD(found, lr=0.1, weight_decay=0.01),
    "momentum": lambda found: torch.optim.SGD(found, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda found: torch.optim.Adam(found, lr=0.01),
    "amsgrad": lambda found: torch.optim.AdamW(found, lr=0.01, amsgrad=True),
}
LABELS = torch.tensor([3, 1])


def convolutions():
    """Return a network whose second convolution is its largest layer."""
    model = nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 10, 3, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(90, 4),
    )  # fmt: skip
    return model, functional.cross_entropy, (torch.randn(2, 2, 8, 8), LABELS)


def autoencoder():
    """Return a network of linear layers."""
    layers = [nn.Linear(20, 9), nn.ReLU(), nn.Linear(9, 4), nn.ReLU(), nn.Linear(4, 20)]
    return nn.Sequential(*layers), functional.mse_loss, (torch.randn(3, 20), torch.randn(3, 20))


def encoder():
    """Return a block of BERT."""
    model = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    return model, functional.mse_loss, (torch.randn(2, 5, 8), torch.randn(2, 5, 8))


def depthwise():
    """Return a network with a depthwise and a pointwise convolution."""
    model = nn.Sequential(
        nn.Conv2d(2, 8, 1), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 6, 1), nn.Flatten(),
        nn.Linear(96, 4),
    )  # fmt: skip
    return model, functional.cross_entropy, (torch.randn(2, 2, 6, 6), LABELS)


def lowered(network, optimizer="sgd", **options):
    """Return a step of a network with an optimizer."""
    torch.manual_seed(0)
    model, loss, inputs = network()
    found = None if optimizer is None else OPTIMIZERS[optimizer](list(model.parameters()))
    return lower(model, loss, inputs, optimizer=found, **options)


def trained(step, *, steps=3):
    """Return the state after some steps on random batches, computed in double."""
    memory = Memory(step.buffers, learning_rate=step.learning_rate or 0.0)
    for name, values in step.values.items():
        memory[name][...] = values
    random = np.random.default_rng(1)
    for _ in range(steps):
        for value in step.inputs:
            array = memory[value.pieces[0].buffer]
            integers = array.dtype == np.int32
            array[...] = (
                random.integers(0, 4, array.shape) if integers else random.normal(size=array.shape)
            )
        for node, calls in zip(step.graph.nodes, step.calls, strict=True):
            memory.execute(calls, workspace_bytes=node.workspace_bytes)
    return {
        value.name: np.concatenate([memory[ref.buffer] for ref in value.pieces])
        for value in step.states
    }


def pieces(step):
    """Return how many tiles each state tensor has, those in one piece left out."""
    return {v.name: len(v.pieces) for v in step.states if len(v.pieces) > 1}


def check_same(step, tile_bytes):
    """Hold a step in tiles to the whole one, and return it."""
    found = tiled(step, tile_bytes)
    expected = trained(step)
    for name, values in trained(found).items():
        np.testing.assert_allclose(values, expected[name], rtol=1e-12, atol=1e-12, err_msg=name)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "optimizer"),
    rotating(product((convolutions, autoencoder, encoder), OPTIMIZERS), {(convolutions, "adam")}),
)
def test_tiles_train_as_whole_parameters_do(network, optimizer):
    """Every state tensor has the same values after three steps, whatever the optimizer."""
    found = check_same(lowered(network, optimizer), 256)
    assert pieces(found)


def test_tiles_are_state_with_gradients_and_updates_of_their_own():
    """10 channels of 216 B in tiles of 800 B: three of 3 and one of 1; of 1,296 B: fours."""
    step = lowered(convolutions, "momentum")
    found = check_same(step, 800)
    assert pieces(found)["2.weight"] == pieces(found)["2.weight.momentum_buffer"] == 4
    state = next(value for value in found.states if value.name == "2.weight")
    names = [f"2.weight[{first}:{end}]" for first, end in ((0, 3), (3, 6), (6, 9), (9, 10))]
    assert state.pieces == tuple(map(Ref, names))
    assert state.shape == (10, 6, 3, 3)
    graph = found.graph
    for name in names:
        i = graph.tensor_index[name]
        *readers, update = (graph.nodes[k] for k in graph.users_of[i])
        assert [reader.phase for reader in readers] == [Phase.FORWARD, Phase.BACKWARD]
        assert update.phase == Phase.UPDATE
        gradient = next(
            n
            for n in update.inputs
            if graph.nodes[graph.node_of[graph.tensor_index[n]]].phase == Phase.BACKWARD
        )
        assert graph.tensor_bytes[graph.tensor_index[gradient]] == graph.tensor_bytes[i]
    assert sum(graph.tensor_bytes[i] for i in graph.state_tensors) == sum(
        step.graph.tensor_bytes[i] for i in step.graph.state_tensors
    )
    assert graph.flops == step.graph.flops
    found = next(value for value in tiled(step, 6 * 216).states if value.name == "2.weight")
    assert found.pieces == tuple(Ref(f"2.weight[{k}]") for k in ("0:4", "4:8", "8:10"))


def test_tiles_lower_the_least_ram():
    """No node needs a weight and its gradient: the update of the largest layer was the floor."""
    step = lowered(autoencoder, "adam")
    node = step.graph.nodes[floor(step.graph).node]
    assert node.phase == Phase.UPDATE
    assert floor(tiled(step, 200).graph).bytes < floor(step.graph).bytes / 2


def test_readers_that_need_the_most_become_chains():
    """Each link reads one tile and goes on in place; the last reader's links have the updates."""
    step = lowered(autoencoder, "momentum")
    found = check_same(step, 200)
    graph = found.graph
    whole = {value.name: len(value.pieces) for value in found.states}
    assert whole["0.weight"] == 5  # 9 channels of 80 B: two in each tile
    links = [node for node in graph.nodes if node.in_place and "addmm" in node.name]
    assert links
    for node in links:
        ((made, before),) = node.in_place
        assert before in node.inputs
        assert {made} == {tensor.name for tensor in node.outputs}
        assert sum(name in graph.tensor_index and "weight[" in name for name in node.inputs) == 1
    # A tile is read for the gradient of the input, then replaced, before the next one is read.
    order = [node.name for node in graph.nodes if node.name.startswith("4")]
    back = [k for k, name in enumerate(order) if name.startswith("4/mm[")]
    assert len(back) > 1
    assert all("sgd[" in "".join(order[a:b]) for a, b in pairwise(back))


def test_what_cannot_be_split_stays_whole():
    """Depthwise weights stay whole; all, where gradients are clipped, small, or handed out."""
    found = check_same(lowered(depthwise), 64)
    assert "1.weight" not in pieces(found)
    assert pieces(found)["2.weight"] == 3
    step = lowered(autoencoder, "sgd", clip_grad_norm=0.1)
    assert tiled(step, 64) is step
    step = lowered(autoencoder)
    assert tiled(step, 720) is step
    handed_out = lowered(autoencoder, None)
    assert tiled(handed_out, 64) is handed_out
    with pytest.raises(InputError, match="tile: '1KiB' is for a step that updates"):
        in_tiles(handed_out, "1KiB")
    with pytest.raises(InputError, match="tile: expected a size above 0"):
        in_tiles(step, 0)


def test_shared_weights_stay_whole():
    """A weight with two readers of different kinds is not split; another one is."""

    def network():
        tokens, rows = torch.tensor([[1, 2, 3]]), nn.Embedding(10, 6)
        layers = {"embedding": rows, "inner": nn.Linear(6, 6), "head": nn.Linear(6, 10)}
        layers["head"].weight = rows.weight
        tied = Through(lambda own, x: own.head(own.inner(own.embedding(x))).flatten(0, 1), **layers)
        return tied, functional.cross_entropy, (tokens, tokens.flatten())

    found = check_same(lowered(network), 64)
    assert set(pieces(found)) == {"inner.weight"}
