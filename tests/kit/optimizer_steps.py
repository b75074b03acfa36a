"""Whole training steps, with the updates of an optimizer, and the same as PyTorch does them."""

import copy
from dataclasses import replace

import torch

from kit.eager_steps import eager_step, keep_all
from poetmodel.device import StorageMode
from poetmodel.plan import Instruction, Op, Plan
from poetmodel.plan.derivation import add_waits_and_frees
from poetmodel.torch import trace
from poetmodel.torch.runtime.runner import Runner

SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
NADAM, RMSPROP, ADAGRAD = torch.optim.NAdam, torch.optim.RMSprop, torch.optim.Adagrad

OPTIMIZERS = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "weight decay": lambda p: SGD(p, lr=0.1, weight_decay=0.02),
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "dampening": lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.1),
    "nesterov": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.02),
    "maximize": lambda p: SGD(p, lr=0.1, momentum=0.9, maximize=True),
    "foreach": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.02, foreach=True),
    "sgd, fused": lambda p: SGD(
        p, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.1, maximize=True, fused=True
    ),
    "adam": lambda p: ADAM(p, lr=0.01),
    "adam, weight decay": lambda p: ADAM(p, lr=0.01, weight_decay=0.1, maximize=True),
    "adamw": lambda p: ADAMW(p, lr=0.01),
    "amsgrad": lambda p: ADAMW(p, lr=0.01, amsgrad=True, betas=(0.8, 0.9), eps=1e-6),
    "adam, foreach": lambda p: ADAM(p, lr=0.01, weight_decay=0.1, foreach=True),
    "adam, fused": lambda p: ADAM(p, lr=0.01, weight_decay=0.1, maximize=True, fused=True),
    "adamw, fused": lambda p: ADAMW(p, lr=0.01, amsgrad=True, fused=True),
    "adam, groups": lambda p: ADAMW(
        [
            dict(each, betas=(0.5 + 0.2 * k, 0.99), eps=10.0 ** -(4 + k), amsgrad=k == 1)
            for k, each in enumerate(grouped(p))
        ],
        lr=0.01,
    ),
    "nadam": lambda p: NADAM(p, lr=0.01, weight_decay=0.1, maximize=True),
    "nadam, decoupled": lambda p: NADAM(
        p, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True, momentum_decay=0.1
    ),
    "nadam, foreach": lambda p: NADAM(p, lr=0.01, foreach=True),
    "rmsprop": lambda p: RMSPROP(p, lr=0.01),
    "rmsprop, momentum": lambda p: RMSPROP(
        p, lr=0.01, alpha=0.9, momentum=0.8, weight_decay=0.1, maximize=True
    ),
    "rmsprop, centered": lambda p: RMSPROP(p, lr=0.01, centered=True, momentum=0.8),
    "rmsprop, foreach": lambda p: RMSPROP(p, lr=0.01, centered=True, foreach=True),
    "adagrad": lambda p: ADAGRAD(p, lr=0.01),
    "adagrad, decay": lambda p: ADAGRAD(
        p, lr=0.01, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.3, maximize=True
    ),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01, weight_decay=0.1, maximize=True),
    "adamax, foreach": lambda p: torch.optim.Adamax(p, lr=0.01, foreach=True),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01, betas=(0.9, 0.9), weight_decay=0.1),
    "radam, decoupled": lambda p: torch.optim.RAdam(
        p, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True, maximize=True
    ),
    "radam, foreach": lambda p: torch.optim.RAdam(p, lr=0.01, betas=(0.9, 0.9), foreach=True),
    "adagrad, fused": lambda p: ADAGRAD(p, lr=0.01, lr_decay=0.1, weight_decay=0.1, fused=True),
    "adagrad, foreach": lambda p: ADAGRAD(p, lr=0.01, lr_decay=0.1, foreach=True),
}
"""Optimizers by name; each update must be eager's bit for bit."""


def in_order(graph, computed=None):
    """Return a plan that computes nodes in order and frees each tensor after its last use."""
    nodes = range(len(graph.nodes)) if computed is None else computed
    steps = [Instruction(Op.COMPUTE, k) for k in nodes]
    mode = StorageMode.BLOCKING
    plan = Plan(program=(), mode=mode, resident=graph.state_tensors)
    return replace(plan, program=add_waits_and_frees(plan.homes(graph), steps, mode))


def runner(traced, plan=None):
    """Return what runs a traced step, in order if there is no plan."""
    graph = traced.graph
    return Runner(traced, plan or in_order(graph), range(len(graph.tensors)))


class Twins:
    """A model and its optimizer, and a copy of both that eager PyTorch trains."""

    def __init__(self, step, make, *, clip=None):
        self.model, self.loss_fn, self.inputs = step
        self.clip = clip
        self.twin = copy.deepcopy(self.model)
        self.optimizers = (make(self.model.parameters()), make(self.twin.parameters()))

    def trace(self, **options):
        """Trace the step of the model with its optimizer."""
        return trace(
            self.model, self.loss_fn, self.inputs,
            optimizer=self.optimizers[0], clip_grad_norm=self.clip, **options,
        )  # fmt: skip

    def compiled(self, **options):
        """Compile the step of the model with its optimizer, to keep everything by default."""
        return keep_all(
            self.model, self.loss_fn, self.inputs, time_limit=options.pop("time_limit", 2),
            optimizer=self.optimizers[0], clip_grad_norm=self.clip, **options,
        )  # fmt: skip

    def trained(self, step, steps=3):
        """Return what is not eager's after some runs of a compiled step."""
        return self.differing(step.compiled.trace, lambda _: step(*self.inputs), steps)

    def apart(self):
        """Return what is not eager's now."""
        return [name for name, *both in self._state() if not torch.equal(*both)]

    def eager(self):
        """Run a step of the copy."""
        optimizer = self.optimizers[1]
        optimizer.zero_grad()
        loss = eager_step(self.twin, self.loss_fn, copy.deepcopy(self.inputs))
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.twin.parameters(), self.clip)
        optimizer.step()
        return loss

    def both_eager(self):
        """Run a step of both in eager PyTorch, with the same random numbers and no clipping."""
        for model, optimizer in zip((self.model, self.twin), self.optimizers, strict=True):
            optimizer.zero_grad()
            torch.manual_seed(2)
            self.loss_fn(model(*self.inputs[:-1]), self.inputs[-1]).backward()
            optimizer.step()
            optimizer.zero_grad()

    def differing(self, traced, run, steps=3):
        """Run steps of both, with other learning rates each; return what is not equal."""
        found = []
        for step in range(steps):
            state = torch.get_rng_state()
            loss = run(traced.joint.flat_inputs(self.inputs))
            after = torch.get_rng_state()
            torch.set_rng_state(state)
            pairs = [("loss", loss, self.eager()), ("random", after, torch.get_rng_state())]
            pairs += self._state()
            found += [f"{step}: {name}" for name, *both in pairs if not torch.equal(*both)]
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] *= 0.7
        return found

    def _state(self):
        """Return what both hold now, by name."""
        ours, theirs = self.model.state_dict(), self.twin.state_dict()
        pairs = [(name, ours[name], theirs[name]) for name in theirs]
        mine, its = (optimizer.state_dict()["state"] for optimizer in self.optimizers)
        assert mine.keys() == its.keys()
        for number, moments in its.items():
            kept = {key: value for key, value in moments.items() if value is not None}
            assert mine[number].keys() == kept.keys()
            pairs += [(f"{number}.{key}", mine[number][key], kept[key]) for key in kept]
        return pairs


def grouped(parameters):
    """Return parameters in two groups with settings of their own."""
    everything = list(parameters)
    return [
        {"params": everything[:1], "lr": 0.5, "momentum": 0.0},
        {"params": everything[1:], "lr": 0.05, "weight_decay": 0.1, "nesterov": True},
    ]
