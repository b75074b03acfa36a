"""The identity of a step: equal identities permit continued training, other steps differ."""

import re
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import poetmodel.torch as pmt
from kit.quantized_networks import convert_front, float_front, images
from poetmodel.export.exporting import export_step
from poetmodel.lowered.calls import Buffer, DataType
from poetmodel.lowered.identity import step_identity
from poetmodel.lowered.io import load_step, save_step
from poetmodel.lowered.tables import with_byte_inputs
from poetmodel.tiling.choice import divide_step
from poetmodel.torch.lowering.inference import with_inference
from poetmodel.torch.lowering.step import lower

INPUTS = (torch.randn(2, 2, 8), torch.tensor([1, 6]), torch.tensor([0, 2]))


class Small(nn.Module):
    """A front, statistics, an embedding, dropout, and a buffer that no step changes."""

    def __init__(self, seed=5):
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv1d(2, 4, 3, padding=1)
        self.bn = nn.BatchNorm1d(4)
        self.emb = nn.Embedding(7, 3)
        self.head = nn.Linear(4 * 8 + 3, 3)
        self.drop = nn.Dropout(0.2)
        self.register_buffer("scale", torch.tensor([0.5]))

    def forward(self, x, who):
        """Return the scores of classes."""
        x = torch.tanh(self.bn(self.conv(x * self.scale))).flatten(1)
        return self.head(self.drop(torch.cat([x, self.emb(who)], 1)))


def small(seed=5, **settings):
    """Return a model with other settings of its modules, by their names."""
    model = Small(seed)
    for name, value in settings.items():
        module, _, key = name.partition("__")
        setattr(getattr(model, module), key, value)
    return model


def frozen(*, scale=1.0, zero=0.0):
    """Return a model behind a frozen front whose weights are multiplied."""
    model = Small()
    model.conv.requires_grad_(requires_grad=False)
    model.conv.weight.data.mul_(scale)
    model.conv.weight.data[0, 0, 0] += zero
    return model


def buffered(value):
    """Return a model with another value of the buffer that no step changes."""
    model = Small()
    model.scale.fill_(value)
    return model


def identity(model=None, loss_fn=functional.cross_entropy, inputs=INPUTS, *, rule=None, **options):
    """Return the identity of a step, with Adam unless another rule is given."""
    model = Small() if model is None else model
    rule = torch.optim.Adam if rule is None else rule
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return step_identity(lower(model, loss_fn, inputs, optimizer=rule(trained), **options))


@cache
def own_identity():
    """Return the identity of the step that others are compared with."""
    return identity()


def adam(**numbers):
    """Return Adam with other numbers."""
    return lambda parameters: torch.optim.Adam(parameters, **numbers)


def sgd(**numbers):
    """Return SGD with momentum, and with other numbers."""
    return lambda parameters: torch.optim.SGD(parameters, **{"lr": 0.1, "momentum": 0.9} | numbers)


def two_rates(factor):
    """Return SGD with two groups, of which the second has a multiple of the rate of the first."""

    def rule(parameters):
        groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.1 * factor}]
        return torch.optim.SGD(groups, lr=0.1)

    return rule


def weighted(*weights):
    """Return the cross entropy with weights of classes."""
    return nn.CrossEntropyLoss(weight=torch.tensor(weights))


OTHERS = {
    "betas": {"rule": adam(betas=(0.5, 0.9))},
    "epsilon of the optimizer": {"rule": adam(eps=1e-6)},
    "weight decay": {"rule": adam(weight_decay=0.1)},
    "dropout": {"model": lambda: small(drop__p=0.5)},
    "epsilon of batch norm": {"model": lambda: small(bn__eps=1e-2)},
    "momentum of batch norm": {"model": lambda: small(bn__momentum=0.2)},
    "a buffer": {"model": lambda: buffered(0.25)},
    "smoothed labels": {"loss_fn": nn.CrossEntropyLoss(label_smoothing=0.1)},
    "weights of classes": {"loss_fn": weighted(1.0, 2.0, 3.0)},
    "other weights of classes": {"loss_fn": weighted(3.0, 1.0, 0.1)},
    "frozen front": {"model": frozen},
    "another frozen front": {"model": lambda: frozen(scale=-3)},
    "a frozen front with one other weight": {"model": lambda: frozen(zero=2**-20)},
    "clipped": {"clip_grad_norm": 1.0},
    "sums of two": {"accumulate": 2},
    "second beta": {"rule": adam(betas=(0.9, 0.99))},
    "maximize": {"rule": adam(maximize=True)},
    "amsgrad": {"rule": adam(amsgrad=True)},
    "decoupled": {"rule": torch.optim.AdamW},
    "another momentum": {"rule": sgd(momentum=0.8)},
    "dampening": {"rule": sgd(dampening=0.1)},
    "nesterov": {"rule": sgd(nesterov=True)},
    "other rates of groups": {"rule": two_rates(3)},
    "batch norm in evaluation": {"model": lambda: small(bn__training=False)},
    "more smoothed labels": {"loss_fn": nn.CrossEntropyLoss(label_smoothing=0.2)},
    "ignored label": {"loss_fn": nn.CrossEntropyLoss(ignore_index=1)},
    "sum": {"loss_fn": nn.CrossEntropyLoss(reduction="sum")},
    "clipped to less": {"clip_grad_norm": 0.5},
    "sums of three": {"accumulate": 3},
    "a larger batch": {"inputs": tuple(torch.cat([x, x]) for x in INPUTS)},
    "rates of groups": {"rule": two_rates(2)},
    "momentum": {"rule": sgd()},
}


FEW = ("betas", "a buffer", "weights of classes", "clipped")


@pytest.mark.parametrize("others", [FEW, pytest.param(tuple(OTHERS), marks=pytest.mark.slow)])
def test_everything_that_changes_what_is_computed_counts(others):
    """No two of these steps may go on from each other's state."""
    found = {"": own_identity()}
    for name in others:
        options = OTHERS[name]
        make = options.get("model", Small)
        found[name] = identity(**{**options, "model": make()})
    same = [name for name, value in found.items() if [*found.values()].count(value) > 1]
    assert same == []


def test_what_changes_nothing_does_not_count():
    """Initial values, the caller's rate, names, and values of the example."""
    inputs = torch.randn(2, 2, 8), torch.tensor([0, 0]), torch.tensor([1, 1])
    assert identity(Small(6), inputs=inputs, rule=adam(lr=0.5), name="another") == own_identity()


def test_names_of_state_count():
    """Two layers of one shape in the other order: the state of one is not that of the other."""

    class Ordered(nn.Module):
        def __init__(self, *, swapped):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.swapped = swapped

        def forward(self, x):
            first, second = (self.b, self.a) if self.swapped else (self.a, self.b)
            return second(torch.tanh(first(x)))

    def found(swapped):
        inputs = (torch.randn(3, 4), torch.randn(3, 4))
        return identity(Ordered(swapped=swapped), functional.mse_loss, inputs, rule=sgd())

    assert found(swapped=False) != found(swapped=True)


def test_files_inference_and_tiles_leave_it(tmp_path):
    """A read step has the identity of the written one; `export` computes it before tiles."""
    model = nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 4))
    inputs = (torch.randn(2, 12), torch.tensor([0, 2]))
    optimizer = torch.optim.Adam(model.parameters())
    step = lower(model, functional.cross_entropy, inputs, optimizer=optimizer)
    save_step(step, tmp_path / "a.step.json")
    assert step_identity(load_step(tmp_path / "a.step.json")) == step_identity(step)
    assert divide_step(step, "256B").graph.nodes != step.graph.nodes
    both = with_inference(step, model, functional.cross_entropy, inputs)
    given = {"gap": 0.5, "commit": True, "ram": "24KiB", "stack": "1KiB"}
    ways = {
        "plain": (step, {}),
        "tiles": (step, {"tile": "256B"}),
        "inference": (both, {"infer": True, "prefix": "kws"}),
        "paged": (step, {"ram": "9KiB", "checksum": False, "weights": "binary"}),
        "mapped": (step, {"device": "nano33ble", "commit_every": 4}),
    }
    headers = {}
    for name, (of, options) in ways.items():
        export_step(of, tmp_path / name, **given | options)
        prefix = options.get("prefix", "pm")
        headers[name] = (tmp_path / name / "include" / f"{prefix}.h").read_text(encoding="utf-8")
    found = {name: re.findall(r"STEP_ID (0x\w+)u", text) for name, text in headers.items()}
    assert found == {name: [f"0x{step_identity(step)[:8]}"] for name in ways}


def test_meanings_of_bytes_count():
    """Scales of byte inputs count, and the model's own conversion of bytes."""

    class Pixels(nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.layer, self.scale = nn.Linear(6, 4), scale

        def forward(self, x):
            return self.layer(x.float() * self.scale)

    model, labels = nn.Sequential(nn.Linear(6, 4)), torch.tensor([0, 1, 2])
    step = lower(
        model, functional.cross_entropy, (torch.randn(3, 6), labels),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    )  # fmt: skip
    (name,) = (value.name for value in step.inputs if value.shape == (3, 6))
    meanings = ("uint8:0.1", "uint8:0.2", "int8:0.1", "uint8:0.1:1")
    found = {step_identity(with_byte_inputs(step, {name: text})) for text in meanings}
    found.add(step_identity(step))
    images = torch.zeros(3, 6, dtype=torch.uint8)
    found |= {
        identity(Pixels(scale), functional.cross_entropy, (images, labels), rule=sgd())
        for scale in (0.5, 0.25)
    }
    assert len(found) == len(meanings) + 3


@pytest.mark.slow
def test_weights_and_scales_of_an_int8_front_count():
    """One element of one layer, or another scale: another front."""

    def front(*, factor=1.0, step=0.0):
        torch.manual_seed(0)
        layers = float_front()
        layers[0].weight.data[0, 0, 0, 0] += step
        return nn.Sequential(
            pmt.quantized(convert_front(layers, factor * images(8))), nn.Linear(10, 3)
        )

    inputs = (images(), torch.randn(2, 3))
    fronts = {"same": {}, "weights": {"step": 0.05}, "scales": {"factor": 1.5}}
    made = {name: front(**options) for name, options in {"": {}, **fronts}.items()}
    found = {name: identity(m, functional.mse_loss, inputs, rule=sgd()) for name, m in made.items()}
    assert found[""] == found["same"]
    assert len(set(found.values())) == 3


def test_a_constant_counts_where_a_call_reads_it():
    """A frozen tensor that no call reads is not part of the computation."""
    model = frozen()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    step = lower(model, functional.cross_entropy, INPUTS, optimizer=optimizer)
    one = np.ones(1, "<f4")
    buffers = {**step.buffers, "unread": Buffer(elements=1, type=DataType.REAL)}
    more = replace(step, buffers=buffers, values={**step.values, "unread": one})
    assert step_identity(more) == step_identity(step)
    read = replace(step, values={**step.values, "conv.bias": 2 * step.values["conv.bias"]})
    assert step_identity(read) != step_identity(step)
