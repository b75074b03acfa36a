"""Steps of optimizers, running statistics and the norm of gradients against PyTorch."""

import pytest
import torch

from kit.kernel_calls import Memory
from poetmodel.lowered.calls import Buffer, DataType
from poetmodel.torch.errors import CaptureError
from poetmodel.torch.lowering.operands import Lowering, StridedView, find_lowering
from poetmodel.torch.step.optimizers import OptimizerMoment, group_rules
from poetmodel.torch.step.updates import BatchCount, BufferUpdate, GradientNorm, ParameterUpdate

RATE = 0.03
SHAPE = (4, 5)

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, RATE),
    "sgd, decay": lambda p: torch.optim.SGD(p, RATE, weight_decay=0.1),
    "sgd, maximize": lambda p: torch.optim.SGD(p, RATE, weight_decay=0.1, maximize=True),
    "momentum": lambda p: torch.optim.SGD(p, RATE, momentum=0.9),
    "nesterov": lambda p: torch.optim.SGD(p, RATE, 0.9, nesterov=True, weight_decay=0.1),
    "dampening": lambda p: torch.optim.SGD(p, RATE, 0.9, 0.3, maximize=True),
    "adam": lambda p: torch.optim.Adam(p, RATE),
    "adam, decay": lambda p: torch.optim.Adam(p, RATE, weight_decay=0.1, eps=1e-3),
    "adam, no means": lambda p: torch.optim.Adam(p, RATE, betas=(0.0, 0.6)),
    "amsgrad": lambda p: torch.optim.Adam(p, RATE, amsgrad=True, maximize=True),
    "adamw": lambda p: torch.optim.AdamW(p, RATE, weight_decay=0.1),
    "adamw, amsgrad": lambda p: torch.optim.AdamW(p, RATE, betas=(0.3, 0.9), amsgrad=True),
    "nadam": lambda p: torch.optim.NAdam(p, RATE, weight_decay=0.1, maximize=True),
    "nadam, decoupled": lambda p: torch.optim.NAdam(
        p, RATE, (0.3, 0.9), 1e-4, 0.1, momentum_decay=0.1, decoupled_weight_decay=True
    ),
    "rmsprop": lambda p: torch.optim.RMSprop(p, RATE, weight_decay=0.1, maximize=True),
    "rmsprop, centered": lambda p: torch.optim.RMSprop(p, RATE, 0.4, centered=True),
    "rmsprop, momentum": lambda p: torch.optim.RMSprop(p, RATE, eps=1e-4, momentum=0.8),
    "rmsprop, both": lambda p: torch.optim.RMSprop(p, RATE, momentum=0.8, centered=True),
    "adamax": lambda p: torch.optim.Adamax(p, RATE, weight_decay=0.1, maximize=True),
    "radam": lambda p: torch.optim.RAdam(p, RATE, betas=(0.9, 0.95), weight_decay=0.1),
    "radam, decoupled": lambda p: torch.optim.RAdam(
        p, RATE, weight_decay=0.1, decoupled_weight_decay=True, maximize=True
    ),
    "adagrad": lambda p: torch.optim.Adagrad(p, RATE),
    "adagrad, decay": lambda p: torch.optim.Adagrad(
        p, RATE, 0.1, 0.1, initial_accumulator_value=0.3, maximize=True
    ),
}


@pytest.fixture(autouse=True)
def _numbers_of_optimizers_in_double():
    """Let PyTorch keep its numbers, such as NAdam's product of momenta, as doubles."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Lowered:
    """An operation on tensors by name, lowered and executed in the memory of its state."""

    def __init__(self, operation, *arguments, **tensors):
        graph = torch.fx.Graph()
        nodes = {name: graph.placeholder(name) for name in tensors}
        looks = {nodes[name]: look(tensor, name) for name, tensor in tensors.items()}
        named = torch.utils._pytree.tree_map(lambda a: nodes.get(a, a), arguments)
        outputs = {0: look(torch.zeros((), dtype=torch.float64), "out")}
        self.operation = Lowering(graph.call_function(operation, named), looks.__getitem__, outputs)
        found = find_lowering(operation)
        assert found is not None
        found(self.operation)
        self.looks = {name: looks[node] for name, node in nodes.items()}
        self.looks["out"] = outputs[0]
        sizes = {n: Buffer(elements=k.elements, type=k.type) for n, k in self.looks.items()}
        self.memory = Memory(sizes, learning_rate=RATE)
        for name, tensor in tensors.items():
            self.put(name, tensor)

    def put(self, name, tensor):
        """Set the elements of a tensor in its layout."""
        size = self.looks[name].elements
        self.memory[name][:] = tensor.detach().as_strided((size,), (1,)).numpy()

    def got(self, name):
        """Return a tensor."""
        own = self.looks[name]
        return torch.from_numpy(self.memory[name].copy()).as_strided(own.shape, own.strides)

    def execute(self):
        """Execute the calls."""
        self.memory.execute(self.operation.calls, workspace_bytes=self.operation.workspace_bytes)


def look(tensor, name):
    """Return the look of a tensor that has a buffer of its own."""
    kind = DataType.INT32 if tensor.dtype is torch.int64 else DataType.REAL
    return StridedView(
        buffer=name, offset=0, shape=tuple(tensor.shape), strides=tensor.stride(), type=kind
    )


def real(*shape, seed=0):
    """Return random numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def trained(name, parameter):
    """Return a parameter, its optimizer, and the optimizer's state before its first step."""
    parameter = parameter.clone().requires_grad_()
    optimizer = OPTIMIZERS[name]([parameter])
    rule = group_rules(optimizer)[0][0]
    state = {key: OptimizerMoment(optimizer, parameter, key).value() for key in rule.moment_keys}
    if name == "dampening":
        state["momentum_buffer"].fill_(float("nan"))
    return parameter, optimizer, state


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_five_steps(name):
    """After five steps, parameters and moments are those of PyTorch's optimizer."""
    parameter, optimizer, state = trained(name, real(*SHAPE))
    rule = group_rules(optimizer)[0][0]
    names = ["w", *state]
    ours = Lowered(ParameterUpdate(rule), names, ["g"], "lr", w=parameter, g=real(*SHAPE), **state)
    assert not ours.operation.workspace_bytes
    for step in range(5):
        gradient = real(*SHAPE, seed=step)
        ours.put("g", gradient)
        ours.execute()
        parameter.grad = gradient.clone()
        optimizer.step()
        torch.testing.assert_close(ours.got("w"), parameter.detach(), rtol=1e-12, atol=1e-12)
        for key in state:
            want = optimizer.state[parameter][key]
            torch.testing.assert_close(ours.got(key), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["sgd", "adam", "nadam", "rmsprop", "adagrad", "adamax", "radam"])
def test_gradients_that_lie_otherwise(name):
    """Several gradients are summed, brought into the parameter's order, and clipped."""
    parameter, optimizer, state = trained(name, real(*SHAPE).t().contiguous().t())
    first, second, factor = real(*SHAPE), real(*SHAPE[::-1], seed=1).t(), torch.tensor(0.3).double()
    ours = Lowered(
        ParameterUpdate(group_rules(optimizer)[0][0]),
        *(["w", *state], ["g", "h"], "lr", "factor"),
        **{"w": parameter, "g": first, "h": second, "factor": factor, **state},
    )
    assert ours.operation.workspace_bytes == 4 * parameter.numel()
    ours.execute()
    parameter.grad = torch.empty_like(parameter).copy_((first + second) * factor)
    optimizer.step()
    torch.testing.assert_close(ours.got("w"), parameter.detach(), rtol=1e-12, atol=1e-12)


def test_parameters_with_gaps():
    """A parameter with gaps is refused."""
    rule = group_rules(torch.optim.SGD([real(2)], RATE))[0][0]
    with pytest.raises(CaptureError, match="expected a dense parameter"):
        Lowered(ParameterUpdate(rule), ["w"], ["g"], "lr", w=real(4, 6)[:, ::2], g=real(4, 3))


def test_buffers():
    """Running statistics and counts get their new values, as they lie."""
    ours = Lowered(
        BufferUpdate(),
        *(["mean", "count"], ["new_mean", "new_count"]),
        mean=real(3, 4),
        count=torch.tensor(3),
        new_mean=real(4, 3).t(),
        new_count=torch.tensor(4),
    )
    ours.execute()
    assert torch.equal(ours.got("mean"), real(4, 3).t())
    assert ours.got("count").item() == 4


def test_batches_are_counted():
    """From 0 again after the last batch of an update."""
    for count, want in ((0, 1), (1, 2), (2, 0)):
        ours = Lowered(BatchCount(3), ["count"], count=torch.tensor(count))
        ours.execute()
        assert ours.got("count").item() == want


@pytest.mark.parametrize("scale", [0.01, 100.0])
def test_gradient_norm(scale):
    """The factor of gradients is that of ``clip_grad_norm_``: at most 1."""
    tensors = {"a": scale * real(3, 4), "b": scale * real(4, 3).t()}
    tensors |= {"c": real(6), "d": real(90), "e": real(35)}
    operation = GradientNorm(0.7, [tensors[name] for name in "acde"])
    ours = Lowered(operation, [[*"ab"], ["c"], ["d"], ["e"]], **tensors)
    ours.execute()
    groups = [[tensors[name] for name in names] for names in ("ab", *"cde")]
    want = operation(groups)
    torch.testing.assert_close(ours.got("out"), want, rtol=1e-12, atol=1e-12)
