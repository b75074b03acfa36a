"""Unrolled networks: sums over all time steps are computed term by term, in less RAM."""

from itertools import product

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from kit.export_agreement import SCHEDULES, Exported, make_batches_like, train_in_torch
from kit.instances import make_rng
from kit.kernel_calls import TOLERANCE, Memory, execute_steps
from kit.rotation import mark_seeds_except, parametrize_parts
from kit.traced_models import FunctionModule
from poetmodel.graph import checkpoint_all_peak_bytes, floor
from poetmodel.lowered.calls import Buffer, Call, DataType, Ref
from poetmodel.lowered.catalogue import find_form, read_loops, write_loops
from poetmodel.lowered.unrolled import unroll_weight_gradients
from poetmodel.torch.lowering.step import lower

CELLS = (nn.GRU, nn.LSTM, nn.RNN)


def recurrent(cell, steps, batch, inputs=3, hidden=4, *, batch_first=True, every=False, **options):
    """Return a training of a recurrent network with a linear layer behind its last step, or all."""
    torch.manual_seed(0)
    made = cell(inputs, hidden, batch_first=batch_first, **options)
    head = nn.Linear((2 if options.get("bidirectional") else 1) * hidden, 3)

    def scores(parts, x):
        y = parts[0](x)[0]
        return parts[1](y if every else y[:, -1] if batch_first else y[-1])

    model = FunctionModule(scores, made, head)
    sizes = (batch, steps) if batch_first else (steps, batch)
    x = torch.randn(*sizes, inputs)
    if every:
        return model, functional.mse_loss, (x, torch.randn(*sizes, 3))
    return model, functional.cross_entropy, (x, torch.randint(0, 3, (batch,)))


def steps_of(training, optimizer=torch.optim.SGD):
    """Return a step as it is captured, and one whose time steps are apart."""
    model, loss, inputs = training
    made = None if optimizer is None else optimizer(model.parameters(), lr=0.1)
    before = lower(model, loss, inputs, optimizer=made, masks=False)
    return before, unroll_weight_gradients(before)


def left(step, memory):
    """Return loss, gradients and state after some steps."""
    values = {value.name: value for value in (*step.states, *step.gradients)}
    found = {"loss": memory[step.loss.buffer]}
    for name, value in values.items():
        (ref,) = value.pieces
        elements = int(np.prod(value.shape, dtype=int))
        found[name] = memory[ref.buffer][ref.offset : ref.offset + elements]
    return found


def check(before, after, *inputs, steps=2):
    """Hold losses, gradients and state of two steps to each other."""
    expected = left(before, execute_steps(before, *inputs, steps=steps))
    found = left(after, execute_steps(after, *inputs, steps=steps))
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(
            found[name], values, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name
        )


def peaks(step):
    """Return keep-all and the least RAM of a step."""
    return checkpoint_all_peak_bytes(step.graph), floor(step.graph).bytes


@parametrize_parts(24)
def test_random_networks_train_as_captured(part):
    """Whatever the cell, its sizes and its optimizer, with dropout and both directions."""
    for seed in part.select(range(24)):
        rng = make_rng(f"recurrent/{seed}")
        cell, layers = rng.choice(CELLS), rng.randint(1, 2)
        options = {
            name: rng.random() < 0.5 for name in ("bidirectional", "batch_first", "every", "bias")
        }
        options["dropout"] = rng.choice((0.0, 0.4)) if layers > 1 else 0.0
        sizes = (rng.randint(1, 4), rng.randint(1, 3), rng.randint(1, 5), rng.randint(1, 5))
        training = recurrent(cell, *sizes, num_layers=layers, **options)
        optimizer = rng.choice((None, torch.optim.SGD, torch.optim.Adagrad))
        before, after = steps_of(training, optimizer)
        check(before, after, *training[2])


STACKED = ({}, {"num_layers": 2}, {"every": True})
QUICK, SLOW = [(nn.GRU, STACKED[2])], [(nn.RNN, STACKED[0]), (nn.LSTM, STACKED[1])]


@pytest.mark.parametrize(
    ("cell", "options"), mark_seeds_except(list(product(CELLS, STACKED)), QUICK, SLOW)
)
def test_no_stack_is_left(cell, options):
    """Gradients of weights, gates and gradients of inputs need no tensor of all time steps.

    So that keep-all and the least RAM fall.
    """
    training = recurrent(cell, 5, 4, 3, 4, **options)
    before, after = steps_of(training)
    largest = max(tensor.bytes for tensor in after.graph.tensors)
    per_step = 4 * 4 * 4  # of a time step: batch times hidden reals
    assert max(tensor.bytes for tensor in before.graph.tensors) >= 5 * per_step
    assert largest < 5 * per_step
    assert "stack" not in {node.op for node in after.graph.nodes}
    assert all(new < old for new, old in zip(peaks(after), peaks(before), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("cell", mark_seeds_except(CELLS, [nn.GRU]))
def test_time_steps_apart_cost_few_instructions(cell):
    """Small products need more instructions, gradients that are summed in place fewer."""
    for batch in (1, 8):
        training = recurrent(cell, 12, batch, 8, 16)
        old, new = (
            sum(node.instructions or 0 for node in step.graph.nodes) for step in steps_of(training)
        )
        assert new < 1.05 * old


@pytest.mark.slow
def test_tensors_that_no_call_touches_stay():
    """A value of which PyTorch only uses the shape is not divided; other nodes are not affected."""
    model, _, inputs = recurrent(nn.GRU, 4, 2)

    def loss(y, target):
        return functional.cross_entropy(torch.addcdiv(y, y, 3 + y * y), target)

    before, after = steps_of((model, loss, inputs))
    named = {name for calls in after.calls for call in calls for name in call.buffers}
    made = {tensor.name for node in after.graph.nodes for tensor in node.outputs}
    assert "loss/empty_like" in made - named
    assert after is not before
    check(before, after, *inputs)


def test_other_networks_stay_as_they_are():
    """They have no stacks, or stacks below the gradient of a weight of five columns."""
    layers = (nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4))
    convolutions = nn.Sequential(*layers), (torch.randn(2, 1, 6, 6), torch.tensor([1, 2]))
    attention = FunctionModule(
        lambda parts, x: functional.scaled_dot_product_attention(*parts[0](x).chunk(3, -1)),
        nn.Linear(8, 24),
    )
    for model, inputs in (convolutions, (attention, (torch.randn(2, 5, 8), torch.ones(2, 5, 8)))):
        loss = functional.cross_entropy if inputs[1].ndim == 1 else functional.mse_loss
        step = lower(model, loss, inputs, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        assert unroll_weight_gradients(step) is step
    before, after = steps_of(recurrent(nn.RNN, 2, 1, 5, 6))
    stacks = [[n.name for n in step.graph.nodes if n.op == "stack"] for step in (before, after)]
    assert stacks[0] == stacks[1] != []


def test_slices_that_do_not_fill_a_tensor_leave_it_whole():
    """Two slices of four of ten elements are no division by the two time steps of the network."""

    class Weights(nn.Module):
        """Four, four and two numbers."""

        def __init__(self):
            super().__init__()
            self.first, self.second = (nn.Parameter(torch.randn(4)) for _ in range(2))
            self.last = nn.Parameter(torch.randn(2))

        def forward(self, x):
            return x

    def scores(parts, x):
        network, head, weights = parts
        joined = torch.cat(
            [torch.tanh(weights.first), torch.tanh(weights.second), torch.tanh(weights.last)]
        )
        y = network(x)[0][:, -1] * joined[:4] + joined[4:8]
        return head(y) + joined[8:].sum()

    torch.manual_seed(0)
    model = FunctionModule(scores, nn.RNN(3, 4, batch_first=True), nn.Linear(4, 3), Weights())
    inputs = torch.randn(16, 2, 3), torch.randint(0, 3, (16,))

    def loss(y, target):
        return functional.cross_entropy(y, target) + (y * y).mean()

    before, after = steps_of((model, loss, inputs))
    assert after is not before
    check(before, after, *inputs)


def test_shared_weights_are_summed_in_place():
    """The second gradient of a weight is added to the first: no separate tensor has it."""
    twice = FunctionModule(lambda parts, x: parts[0](torch.tanh(parts[0](x))), nn.Linear(5, 5))
    training = twice, functional.mse_loss, (torch.randn(3, 5), torch.randn(3, 5))
    before, after = steps_of(training)
    (adding,) = [
        k
        for k, calls in enumerate(after.calls)
        if len(calls) == 2 and after.graph.nodes[k].op == "mm"
    ]
    node = after.graph.nodes[adding]
    assert node.in_place == ((node.outputs[0].name, node.inputs[-1]),)
    assert len(after.graph.nodes) == len(before.graph.nodes) - 1
    check(before, after, *training[2])


# -- loops -----------------------------------------------------------------------------------------
CALLS = {
    "product": Call("pm_mm", (Ref("y"), Ref("x", 1), Ref("z"), 4, 3, 2, 5, 1, 4, 2, 1, 0)),
    "sum": Call("pm_sum", (Ref("y"), Ref("x"), (1, 4, 2, 1), (2, 2, 4, 3, 8), 2.0)),
    "fill": Call("pm_fill", (Ref("y", 2), 6, 0.5)),
    "rows": Call("pm_fill_rows", (Ref("y"), Ref("x"), 2, 4, 6, 2)),
    "copy": Call("pm_copy", (Ref("y"), Ref("x"), (3, 2, 1, 4, 3, 2, 1, 2, 6, 8))),
    "elements": Call("pm_add", (Ref("y"), Ref("x", 3), Ref("z"), (2, 3, 1, 1, 0, 6, 3, 3, 1), 1.0)),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_loops_go_through_what_kernels_do(name):
    """The two halves of the iterations of a dimension have the effect of the call.

    Halves are contiguous, or every second iteration.
    """
    call = CALLS[name]
    loops = read_loops(call)
    assert loops is not None
    whole = write_loops(loops)
    assert whole is not None
    expected = results([call])
    assert np.array_equal(results([whole]), expected, equal_nan=True)
    for d in (k for k, size in enumerate(loops.sizes) if size % 2 == 0 and loops.strides[0][k]):
        for rows in {1, loops.sizes[d] // 2}:
            parts = [loops.select_iterations(d, t, group_size=rows, period=2) for t in range(2)]
            calls = [write_loops(part) for part in parts]
            in_one = name in ("fill", "rows") and loops.strides[0][d] == 1
            assert (None in calls) == (in_one and rows == 1)  # elements one after the other
            elements = [set(part.element_indices(0).flat) for part in parts]
            assert elements[0] | elements[1] == set(np.flatnonzero(~np.isnan(expected)))
            if None not in calls:
                assert np.array_equal(results(calls), expected, equal_nan=True)


def results(calls):
    """Return the results of calls in y; NaN for elements that are not written."""
    memory = Memory({name: Buffer(elements=40, type=DataType.REAL) for name in "xyz"})
    for number, name in enumerate("xz"):
        memory[name][...] = np.random.default_rng(number).normal(size=40)
    memory.execute(calls)
    return memory["y"].copy()


@pytest.mark.parametrize(
    "call",
    [
        Call("pm_log_softmax", (Ref("y"), Ref("x"), (1, 2, 4, 4), 4, 1, 1)),
        Call("pm_bits_scale", (Ref("y"), Ref("x"), Ref("z"), (1, 8, 1, 1), 1.0)),
        Call("pm_conv2d_dw", (Ref("y"), Ref("x"), Ref("z"), (1,) * 16, 1, 0, 1, 1)),
    ],
)
def test_other_kernels_are_no_loops(call):
    """Kernels with other accesses have no loops."""
    form = find_form(call)
    assert form is None or not form.is_general


# -- programs --------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize(
    ("cell", "options"),
    [
        (nn.GRU, {"share": 0.7, "paging": False}),
        (nn.LSTM, SCHEDULES["blocking"]),
        (nn.RNN, SCHEDULES["dma"]),
    ],
)
def test_exported_networks_train_as_pytorch_does(cell, options, tmp_path):
    """In double, whatever is computed again or paged."""
    training = recurrent(cell, 4, 2, 3, 4, num_layers=2)
    model, loss, inputs = training
    step = lower(model, loss, inputs, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
    batches = make_batches_like(inputs, 2)
    expected = train_in_torch(training, batches, 3, "sgd")
    program = Exported(step, tmp_path, time_limit=5.0, **options)
    apart = program.outcome(batches, 3).differences(expected)
    assert max(apart.values()) < TOLERANCE
