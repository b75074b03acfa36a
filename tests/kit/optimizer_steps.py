"""Training steps with the updates of an optimizer, compared with eager PyTorch."""

import copy
from dataclasses import replace

import torch

from kit.eager_steps import compile_keep_all, plan_of_trace, run_eager_step
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
            for k, each in enumerate(group_parameters(p))
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
"""Functions from parameters to an optimizer, by name; updates must equal eager bit for bit."""


def plan_in_order(graph, computed=None):
    """Return a plan that computes `computed`, by default all nodes in order.

    All state is resident, and each tensor is freed after its last use.
    """
    nodes = range(len(graph.nodes)) if computed is None else computed
    steps = [Instruction(Op.COMPUTE, k) for k in nodes]
    mode = StorageMode.BLOCKING
    plan = Plan(program=(), mode=mode, resident=graph.state_tensors)
    return replace(plan, program=add_waits_and_frees(plan.homes(graph), steps, mode))


def make_runner(traced, plan=None):
    """Return a `Runner` of a traced step, by default with the plan of `plan_in_order`."""
    return Runner(traced, plan_of_trace(traced, plan or plan_in_order(traced.graph)))


class Twins:
    """A model and its optimizer, and the twin: a copy of both, which eager PyTorch trains."""

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

    def compile(self, **options):
        """Compile the step of the model with its optimizer, by default with all kept."""
        return compile_keep_all(
            self.model, self.loss_fn, self.inputs, optimizer=self.optimizers[0],
            clip_grad_norm=self.clip, **{"gap": 0.5, "time_limit": 60} | options,
        )  # fmt: skip

    def find_compiled_differences(self, step, steps=3):
        """Execute `steps` steps of both; return the names of values that differ."""
        return self.find_differences(step.compiled.trace, lambda _: step(*self.inputs), steps)

    def find_state_differences(self):
        """Return the names of parameters, buffers and moments that differ between both now."""
        return [name for name, *pair in self._state() if not torch.equal(*pair)]

    def run_eager(self):
        """Execute a step of the twin in eager PyTorch; return the loss."""
        optimizer = self.optimizers[1]
        optimizer.zero_grad()
        loss = run_eager_step(self.twin, self.loss_fn, copy.deepcopy(self.inputs))
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.twin.parameters(), self.clip)
        optimizer.step()
        return loss

    def run_both_eager(self):
        """Execute a step of both in eager PyTorch, with equal random numbers and without clipping.

        Seeds the default generator of PyTorch.
        """
        for model, optimizer in zip((self.model, self.twin), self.optimizers, strict=True):
            optimizer.zero_grad()
            torch.manual_seed(2)
            self.loss_fn(model(*self.inputs[:-1]), self.inputs[-1]).backward()
            optimizer.step()
            optimizer.zero_grad()

    def find_differences(self, traced, run, steps=3):
        """Execute steps of both; return the names of values that differ, with the step's number.

        `run` executes a step from its flat inputs. Learning rates fall by 30 % after each step.
        """
        found = []
        for step in range(steps):
            state = torch.get_rng_state()
            loss = run(traced.joint.flat_inputs(self.inputs))
            after = torch.get_rng_state()
            torch.set_rng_state(state)
            pairs = [("loss", loss, self.run_eager()), ("random", after, torch.get_rng_state())]
            pairs += self._state()
            found += [f"{step}: {name}" for name, *pair in pairs if not torch.equal(*pair)]
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] *= 0.7
        return found

    def _state(self):
        """Return (name, own value, value of the twin) of parameters, buffers and moments."""
        ours, theirs = self.model.state_dict(), self.twin.state_dict()
        pairs = [(name, ours[name], theirs[name]) for name in theirs]
        own_moments, twin_moments = (each.state_dict()["state"] for each in self.optimizers)
        assert own_moments.keys() == twin_moments.keys()
        for number, moments in twin_moments.items():
            present = {key: value for key, value in moments.items() if value is not None}
            assert own_moments[number].keys() == present.keys()
            pairs += [
                (f"{number}.{key}", own_moments[number][key], present[key]) for key in present
            ]
        return pairs


def group_parameters(parameters):
    """Return parameters in two groups with different settings of SGD."""
    all_parameters = list(parameters)
    return [
        {"params": all_parameters[:1], "lr": 0.5, "momentum": 0.0},
        {"params": all_parameters[1:], "lr": 0.05, "weight_decay": 0.1, "nesterov": True},
    ]
