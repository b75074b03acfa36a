"""A compiled step and eager PyTorch side by side; needs PyTorch."""

import copy
from random import Random

import torch

from kit.plans import random_program
from poetmodel.torch import backend, compile, trace
from poetmodel.torch.runtime.runner import Runner
from poetmodel.torch.step.scheduled import ScheduledGraph


def compile_keep_all(*step, **options):
    """Return a step compiled with a keep-all budget and a board's costs, without measurement."""
    return compile(*step, **{"ram": "100%", "device": "rpi4b"} | options)


def run_eager_step(model, loss_fn, inputs):
    """Execute forward pass, loss and backward pass in eager PyTorch; return the loss.

    Adds gradients to those of the model. The last input is the target, unless `loss_fn` is None.
    """
    loss = model(*inputs) if loss_fn is None else loss_fn(model(*inputs[:-1]), inputs[-1])
    loss.backward()
    return loss.detach()


def copy_outcome(model, loss):
    """Return copies of a step's results by name: loss, parameters, gradients, buffers.

    "random" is the state of PyTorch's default generator.
    """
    found = {"loss": loss.clone(), "random": torch.get_rng_state()}
    for name, parameter in model.named_parameters():
        found[f"parameter {name}"] = parameter.detach().clone()
        if parameter.grad is not None:
            found[f"gradient {name}"] = parameter.grad.clone()
    for name, buffer in model.named_buffers():
        found[f"buffer {name}"] = buffer.clone()
    return found


def find_unequal(one, other):
    """Return the names of the results that differ, or that only one of both has."""
    return [
        name
        for name in sorted(one.keys() | other.keys())
        if name not in one or name not in other or not torch.equal(one[name], other[name])
    ]


def find_differences(step, model, loss_fn, inputs):
    """Execute an eager step on a copy, and `step` on the model; return names of unequal results."""
    twin, twin_inputs = copy.deepcopy(model), copy.deepcopy(inputs)
    for copied, parameter in zip(twin.parameters(), model.parameters(), strict=True):
        copied.grad = None if parameter.grad is None else parameter.grad.clone()
    state = torch.get_rng_state()
    expected = copy_outcome(twin, run_eager_step(twin, loss_fn, twin_inputs))
    torch.set_rng_state(state)
    return find_unequal(expected, copy_outcome(model, step(*inputs)))


def plan_of_trace(traced, plan):
    """Return a plan of the graph of a trace, in which all storages are decided on."""
    graph = traced.graph
    return ScheduledGraph(
        graph=graph,
        storage_indices=tuple(range(len(graph.tensors))),
        operations=tuple(range(len(graph.nodes))),
        reserves=(),
    ).to_whole_plan(plan)


def check_random_plans(step, folder, seeds, mode="blocking", page=0.3):
    """Execute random plans of a step twice each; assert that all results equal eager PyTorch.

    `step` is (model, loss_fn, inputs); `page` is the probability of paging. The second execution
    adds to the gradients of the first. Pages are in `folder`. Returns the traced step.
    """
    traced = trace(*step, measure_workspace=False)
    flat = traced.joint.flat_inputs
    for seed in seeds:
        plan = random_program(traced.graph, Random(seed), mode, page=page)  # noqa: S311
        runner = Runner(traced, plan_of_trace(traced, plan), folder=folder)
        for _ in range(2):
            assert find_differences(lambda *given, r=runner: r(flat(given)), *step) == [], seed
        runner.close()
    return traced


def check_replay(step):
    """Assert that a plan without pages has the results of eager PyTorch; return the traced step."""
    return check_random_plans(step, None, range(1), page=0)


def check_both_doors(module, loss_fn, inputs, **options):
    """Assert that `compile` and `backend` have the gradients of eager PyTorch.

    Also assert that the module is one graph. `options` are those of `compile`.
    """
    *x, y = inputs
    with compile_keep_all(module, loss_fn, inputs, **options) as step:
        assert step.verify().equal
    loss_fn(module(*x), y).backward()
    eager = [parameter.grad.clone() for parameter in module.parameters()]
    module.zero_grad()
    back = backend(ram="100%", device="rpi4b")
    run = torch.compile(module, backend=back, fullgraph=True, dynamic=False)
    loss_fn(run(*x), y).backward()
    assert all(map(torch.equal, eager, (parameter.grad for parameter in module.parameters())))
    assert len(back.plans) == 1
