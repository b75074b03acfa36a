"""Programs of ExecuTorch keep their budget, and train with the bits of ExecuTorch's own program.

These tests run in the environment that `tox -e executorch` makes.
"""

import random
import time
from functools import cache, partial

import pytest

pytest.importorskip("executorch", reason="needs the extra executorch: tox -e executorch")

import torch
from torch import nn
from torch.nn import functional

import poetmodel.torch as pmt
from kit.commands import invoke
from kit.executorch_programs import NETWORKS, parse_sufficient_budget, train
from mcu import networks
from poetmodel.errors import BudgetError, InputError
from poetmodel.graph import checkpoint_all_peak_bytes
from poetmodel.torch.executorch.edge import RemoveCopies, capture_edge_program, lower_program
from poetmodel.torch.executorch.planning import read_edge

pytestmark = pytest.mark.filterwarnings("ignore")  # of ExecuTorch, about what is experimental

PROVED_LARGER = {"mlp"}
"""Weights and their gradients are most of what it has in its arena: no order keeps 60 %."""

MODELS = NETWORKS | {"resnet8": networks.thin_resnet8}


@cache
def exported(name):
    """Return a network, its loss and inputs, and its edge program."""
    torch.manual_seed(0)
    made = MODELS[name]()
    return made, capture_edge_program(name, *made)


def write(name, path, **options):
    """Write the program of a network, exported anew: passes change an edge program in place."""
    made, _ = exported(name)
    return pmt.to_executorch(*made, path=path, **{"time_limit": 10, "gap": 0.1, **options})


def planned_bytes(path):
    """Return the memory that a file requests, as its runtime reads it."""
    from executorch.exir._serialize._program import deserialize_pte_binary

    plans = deserialize_pte_binary(path.read_bytes()).program.execution_plan
    (step,) = (plan for plan in plans if plan.name == "forward")
    return sum(step.non_const_buffer_sizes)


@pytest.mark.parametrize("name", MODELS)
def test_a_program_keeps_its_budget_and_has_the_bits_of_executorchs_own(name, tmp_path):
    """At 60 % of its arena, or the least that is proved: losses, gradients, weights of 20 steps."""
    (_, _, inputs), edge = exported(name)
    own = lower_program(edge, use_our_offsets=False)
    path = tmp_path / "step.pte"
    ram = int(0.6 * own.arena_bytes)
    if name in PROVED_LARGER:
        with pytest.raises(BudgetError, match=r"is too little .*: the minimum is ram=") as told:
            write(name, path, ram=ram)
        ram = int(parse_sufficient_budget(str(told.value)))
    made = write(name, path, ram=ram)
    assert made.path == path
    assert planned_bytes(path) == made.arena_bytes <= made.ram_budget_bytes
    assert made.executorch_bytes == own.arena_bytes == own.greedy_bytes
    assert made.arena_bytes <= made.greedy_bytes
    theirs, ours = (train(program, inputs) for program in (own.program, path.read_bytes()))
    assert theirs.keys() == ours.keys()
    assert [key for key in theirs if not torch.equal(theirs[key], ours[key])] == []
    assert len(set(theirs["losses"].tolist())) > 1


@pytest.mark.parametrize("name", ["cnn", "bert-block"])
def test_gradients_are_those_of_pytorch(name, tmp_path):
    """To rounding, in the second step of a program too, which finds memory as the first left it."""
    from executorch.extension.training import _load_for_executorch_for_training as load

    (model, loss_fn, inputs), _ = exported(name)
    write(name, tmp_path / "step.pte", ram="90%")
    step = load(str(tmp_path / "step.pte"))
    for _ in range(2):
        (loss,) = step.forward_backward("forward", inputs)
    expected = loss_fn(model(*inputs[:-1]), inputs[-1])
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    torch.testing.assert_close(loss.reshape(()), expected.detach())
    found = step.named_gradients()
    assert list(found) == [path for path, _ in model.named_parameters()]
    for path, gradient in zip(found, gradients, strict=True):
        torch.testing.assert_close(found[path], gradient, rtol=1e-4, atol=1e-5)


def test_a_percentage_is_of_what_the_same_program_keeps(tmp_path):
    """100 % is keep-all, which needs no recomputation."""
    made = write("cnn", tmp_path / "step.pte", ram="100%")
    step = read_edge(exported("cnn")[1].transform([RemoveCopies()]).exported_program(), name="cnn")
    assert made.keep_all_bytes == checkpoint_all_peak_bytes(step.graph) + step.resident_bytes
    assert made.ram_budget_bytes == made.arena_bytes == made.keep_all_bytes
    assert (made.recomputed, made.overhead) == (0, 0)


def small():
    """Return a small classifier, one layer of which is not trained."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    model[2].requires_grad_(requires_grad=False)
    return model


BATCH = (torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1]))


def test_a_budget_that_is_too_small_is_told_with_the_least(tmp_path):
    """One sentence; the stated budget suffices, and a smaller one does not."""
    path = tmp_path / "step.pte"
    write = partial(pmt.to_executorch, small(), functional.cross_entropy, BATCH, path=path)
    told = r"^ram: 64 B \(.*%\) is too little for the arena of Sequential: the minimum is ram=\d+"
    with pytest.raises(BudgetError, match=told) as raised:
        write(ram=64)
    assert not path.exists()
    least = int(parse_sufficient_budget(str(raised.value)))
    assert planned_bytes(write(ram=least).path) == least
    with pytest.raises(BudgetError, match=rf"the minimum is ram={least} \(.*; .* reserved"):
        write(ram=least - 1)


def test_parameters_without_gradients_are_refused(tmp_path):
    """The error recommends to freeze them."""

    class Beside(nn.Sequential):
        def forward(self, x):
            return self[0](x)

    model = Beside(nn.Linear(4, 3), nn.Linear(4, 3))
    write = partial(pmt.to_executorch, model, functional.cross_entropy, BATCH, ram="100%")
    with pytest.raises(pmt.CaptureError, match="does not depend on it; freeze unused parameters"):
        write(path=tmp_path / "step.pte")
    model[1].requires_grad_(requires_grad=False)
    assert write(path=tmp_path / "step.pte").recomputed == 0


STEP_FILE = """
import torch
from torch import nn


def step():
    torch.manual_seed(0)
    layers = (nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    batch = torch.randn(8, 16), torch.randint(0, 4, (8,))
    return nn.Sequential(*layers), nn.functional.cross_entropy, batch
"""


def test_the_command_line_writes_programs(tmp_path, monkeypatch):
    """Of a function that returns a model, its loss and a batch."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "step_file.py").write_text(STEP_FILE)
    how = ("--ram", "100%", "--optimizer", "momentum", "--json")
    facts = invoke(
        "export", "step_file:step", "--target", "executorch", "--out", "step.pte", *how
    ).json
    assert planned_bytes(tmp_path / "step.pte") == facts["arena_bytes"] == facts["keep_all_bytes"]
    assert facts["sgd"]["momentum"] == 0.9


def trained_loss(path, inputs):
    """Return the loss of a program's first step."""
    from executorch.extension.training import _load_for_executorch_for_training as load

    (loss,) = load(str(path)).forward_backward("forward", inputs)
    return loss


@pytest.mark.parametrize("loss_fn", [functional.mse_loss, lambda o, t: ((o - t) ** 3).mean()])
def test_powers_have_kernels(loss_fn, tmp_path):
    """Of whose overloads ExecuTorch keeps no list."""
    batch = torch.randn(5, 4), torch.randn(5, 3)
    path = tmp_path / "step.pte"
    made = pmt.to_executorch(small(), loss_fn, batch, ram="100%", path=path)
    assert planned_bytes(path) == made.arena_bytes


def test_the_runtime_gets_the_options_of_the_optimizer(tmp_path):
    """SGD with momentum and decay trains like PyTorch's, up to rounding; hooks run once."""
    from executorch.extension.training import _load_for_executorch_for_training as load
    from executorch.extension.training import get_sgd_optimizer

    model, path = small(), tmp_path / "step.pte"
    model.register_forward_pre_hook(lambda _, given: (2 * given[0],))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True)
    made = pmt.to_executorch(
        model, functional.cross_entropy, BATCH, ram="100%", path=path, optimizer=optimizer
    )
    step, theirs = load(str(path)), None
    for _ in range(3):
        step.forward_backward("forward", BATCH)
        theirs = theirs or get_sgd_optimizer(step.named_parameters(), **made.sgd)
        theirs.step(step.named_gradients())
        optimizer.zero_grad()
        functional.cross_entropy(model(BATCH[0]), BATCH[1]).backward()
        optimizer.step()
    weights = step.named_parameters()
    assert list(weights) == ["0.weight", "0.bias", "4.weight", "4.bias"]
    for name, value in weights.items():
        torch.testing.assert_close(value, model.get_parameter(name).detach())


def test_a_batch_by_name_and_a_loss_with_parameters(tmp_path):
    """The program expects the tensors in the order of the names, and trains the loss, too."""

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, *, x, labels, scale):
            return {"loss": scale * functional.cross_entropy(self.layer(x), labels)}

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, output, target):
            return functional.cross_entropy(output * self.weight, target)

    model, path = Named(), tmp_path / "step.pte"
    batch = {"x": BATCH[0], "scale": 2.0, "labels": BATCH[1]}
    pmt.to_executorch(model, None, batch, ram="100%", path=path)
    torch.testing.assert_close(
        trained_loss(path, (BATCH[1], BATCH[0])).reshape(()), model(**batch)["loss"].detach()
    )
    made = pmt.to_executorch(small(), Scaled(), BATCH, ram="100%", path=path)
    assert made.resident_bytes == (8 * 4 + 8 + 3 * 8 + 4 + 4) * 4


REFUSED = {
    "pages": ({"storage": "scratch/"},
        "storage: an ExecuTorch program has all data in its arena and cannot page"),
    "paging": ({"paging": True},
        "paging: an ExecuTorch program has all data in its arena and cannot page"),
    "another file": ({"path": "step.bin"}, "path: expected a file [*].pte, got 'step.bin'"),
    "no size": ({"ram": "much"}, "ram: expected"),
    "adam": ({"optimizer": torch.optim.Adam},
        "optimizer: ExecuTorch's training runtime has only SGD, got Adam"),
    "the wrong way": ({"optimizer": partial(torch.optim.SGD, maximize=True)},
        "optimizer: ExecuTorch's SGD has one group of parameters, and no maximize"),
    "not all": ({"optimizer": lambda parameters: torch.optim.SGD(list(parameters)[:1])},
        "optimizer: expected exactly the parameters that require a gradient"),
    "another precision": (
     {"optimizer": lambda _: torch.optim.SGD([nn.Parameter(torch.ones(3).bfloat16())])},
        "optimizer: ExecuTorch's SGD supports only float32 parameters, got torch.bfloat16"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_executorch_has_not_is_refused(case, tmp_path, monkeypatch):
    """In one sentence, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    options, told = REFUSED[case]
    model = nn.Linear(4, 3)
    given = {"ram": "100%", "path": "step.pte", **options}
    if "optimizer" in given:
        given["optimizer"] = given["optimizer"](model.parameters())
    with pytest.raises(InputError, match=f"^{told}"):
        pmt.to_executorch(model, functional.cross_entropy, BATCH, **given)
    assert list(tmp_path.iterdir()) == []


class Changing(nn.Module):
    """A layer, and a function of its result."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.function, self.n = nn.Linear(4, 3), function, 0

    def forward(self, x):
        """Return logits."""
        return self.function(self, self.layer(x))


def count(model, y):
    """Count in an attribute."""
    model.n += 1
    return y / model.n


CHANGING = {
    "counter": (count, r"forward changes n from 0 to 1 at .*\(model\.n \+= 1\)"),
    "draw": (lambda _, y: y * random.random(), "draws from Python's random"),  # noqa: S311
    "clock": (lambda _, y: y * time.time(), r"time\.time.* at .*test_executorch\.py:"),
    "seed": (
        lambda _, y: (torch.manual_seed(0), y * torch.rand(()))[1],
        r"is seeded at .*test_executorch\.py:",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CHANGING)
def test_what_a_program_cannot_follow_is_refused(case, tmp_path):
    """State, draws, the clock and seeding would be constants of the program."""
    function, told = CHANGING[case]
    model, path = Changing(function), tmp_path / "step.pte"
    with pytest.raises(pmt.CaptureError, match=f"^Changing: .*{told}"):
        pmt.to_executorch(model, functional.cross_entropy, BATCH, ram="100%", path=path)
    assert not path.exists()
    assert model.n == 0


@pytest.mark.parametrize(
    ("layers", "x", "told"),
    [
        ((nn.Linear(4, 4), nn.AvgPool1d(2), nn.Linear(2, 3)), BATCH[0],
         r"^Sequential: ExecuTorch has no kernel for aten\.avg_pool2d_backward\.default; "),
        # Their gradients have a kernel by name, which fails when it runs.
        ((nn.Conv1d(2, 3, 3), nn.Flatten(), nn.Linear(12, 3)), torch.randn(5, 2, 6),
         "supports only images; write a Conv1d as a Conv2d"),
    ],
)  # fmt: skip
def test_an_operator_without_a_kernel_is_named(layers, x, told, tmp_path):
    """One sentence names it, and nothing is written."""
    model, path = nn.Sequential(*layers), tmp_path / "step.pte"
    with pytest.raises(pmt.CaptureError, match=told):
        pmt.to_executorch(model, functional.cross_entropy, (x, BATCH[1]), ram="100%", path=path)
    assert not path.exists()
