"""A compiled step and eager PyTorch side by side; needs PyTorch."""

import copy
from random import Random

import torch

from kit.plans import random_program
from poetmodel.torch import backend, compile, trace
from poetmodel.torch.runtime.runner import Runner


def keep_all(*step, **options):
    """Return a step compiled with a keep-all budget and a board's costs, without measurement."""
    return compile(*step, **{"ram": "100%", "device": "rpi4b"} | options)


def eager_step(model, loss_fn, inputs):
    """Execute forward pass, loss and backward pass in eager PyTorch."""
    loss = model(*inputs) if loss_fn is None else loss_fn(model(*inputs[:-1]), inputs[-1])
    loss.backward()
    return loss.detach()


def outcome(model, loss):
    """Return copies of the results of a step: loss, gradients, buffers, random state."""
    found = {"loss": loss.clone(), "random": torch.get_rng_state()}
    for name, parameter in model.named_parameters():
        found[f"parameter {name}"] = parameter.detach().clone()
        if parameter.grad is not None:
            found[f"gradient {name}"] = parameter.grad.clone()
    for name, buffer in model.named_buffers():
        found[f"buffer {name}"] = buffer.clone()
    return found


def unequal(one, other):
    """Return the names of the results that differ in any bit."""
    return [
        name
        for name in sorted(one.keys() | other.keys())
        if name not in one or name not in other or not torch.equal(one[name], other[name])
    ]


def differing(step, model, loss_fn, inputs):
    """Execute eager on a copy and a step on the model; return the names of different results."""
    twin, own_inputs = copy.deepcopy(model), copy.deepcopy(inputs)
    for mine, its in zip(twin.parameters(), model.parameters(), strict=True):
        mine.grad = None if its.grad is None else its.grad.clone()
    state = torch.get_rng_state()
    expected = outcome(twin, eager_step(twin, loss_fn, own_inputs))
    torch.set_rng_state(state)
    return unequal(expected, outcome(model, step(*inputs)))


def check_random_plans(step, folder, seeds, mode="blocking", page=0.3):
    """Execute random plans with recomputation and paging; assert that each equals eager.

    Gradients are accumulated. Returns the traced step.
    """
    traced = trace(*step, measure_workspace=False)
    flat = traced.joint.flat_inputs
    for seed in seeds:
        plan = random_program(traced.graph, Random(seed), mode, page=page)  # noqa: S311
        runner = Runner(traced, plan, range(len(traced.step_graph.storages)), folder=folder)
        for _ in range(2):
            assert differing(lambda *given, r=runner: r(flat(given)), *step) == [], seed
        runner.close()
    return traced


def replayed(step):
    """Fail unless a step that is computed without pages has eager's bits; return it, traced."""
    return check_random_plans(step, None, range(1), page=0)


def both_doors_have_eager_bits(module, loss_fn, inputs, **options):
    """Fail unless a compiled step and a compiled module, one graph, have a module's own numbers."""
    *x, y = inputs
    with keep_all(module, loss_fn, inputs, **options) as step:
        assert step.verify().equal
    loss_fn(module(*x), y).backward()
    eager = [parameter.grad.clone() for parameter in module.parameters()]
    module.zero_grad()
    back = backend(ram="100%", device="rpi4b")
    run = torch.compile(module, backend=back, fullgraph=True, dynamic=False)
    loss_fn(run(*x), y).backward()
    assert all(map(torch.equal, eager, (parameter.grad for parameter in module.parameters())))
    assert len(back.plans) == 1
