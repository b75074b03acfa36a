"""Comparison of exported C with PyTorch; needs PyTorch and a C compiler."""

import copy
import json
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch

from kit.eager_steps import eager_step
from kit.programs import needs
from kit.shared_objects import build
from poetmodel.device import Device
from poetmodel.export.board import Target, run_program
from poetmodel.export.deployment import parse_stack, reserved_bytes
from poetmodel.export.exporting import DEFAULT_DEVICE, export_step
from poetmodel.graph import checkpoint_all_peak_bytes, floor
from poetmodel.plan import Op
from poetmodel.plan.alignment import align_sizes, device_alignment
from poetmodel.torch.lowering.step import lower

SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW


def two_groups(parameters, *, factor=1.0):
    """Return SGD whose first group has every other parameter, and another rate and decay."""
    every = list(parameters)
    groups = [{"params": every[1::2], "lr": 0.02 * factor}, {"params": every[::2]}]
    groups[1]["weight_decay"] = 0.05
    return SGD(groups, lr=0.003 * factor, momentum=0.9)


OPTIMIZERS = {
    "gradients": (None, None),
    "sgd": (lambda p: SGD(p, lr=0.01), None),
    "momentum": (
        lambda p: SGD(p, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.02), None
    ),
    "adam": (lambda p: ADAM(p, lr=0.001, eps=1e-3, weight_decay=0.02), None),
    "adamw": (lambda p: ADAMW(p, lr=0.001, eps=1e-3, amsgrad=True), None),
    "nadam": (
        lambda p: torch.optim.NAdam(
            p, lr=0.001, eps=1e-3, weight_decay=0.02, decoupled_weight_decay=True
        ),
        None,
    ),
    "rmsprop": (
        lambda p: torch.optim.RMSprop(
            p, lr=0.001, eps=1e-3, momentum=0.8, centered=True, weight_decay=0.02
        ),
        None,
    ),
    "adagrad": (
        lambda p: torch.optim.Adagrad(
            p, lr=0.001, lr_decay=0.1, initial_accumulator_value=0.25, maximize=True
        ),
        None,
    ),
    "adamax": (lambda p: torch.optim.Adamax(p, lr=0.001, eps=1e-3, weight_decay=0.02), None),
    "radam": (lambda p: torch.optim.RAdam(p, lr=0.01, betas=(0.9, 0.9), eps=1e-3), None),
    "clipped": (lambda p: SGD(p, lr=0.01, momentum=0.9), 0.5),
    "groups": (two_groups, None),
}  # fmt: skip
"""Optimizers by name, each with the norm that gradients are clipped to.

What comes before a batch norm may have no gradient but rounding errors, and Adam divides by their
size: what is added to that is larger than by default.
"""

SCHEDULES = {
    "keep-all": {"ram": "101%", "paging": False, "recompute": False},  # a hundredth for addresses
    "recomputed": {"share": 0.3, "paging": False},
    "blocking": {"share": 0.2},
    "dma": {"share": 0.2, "device": "stm32h743"},
    "mapped": {"share": 0.1, "device": "nano33ble"},
    "tiles": {"ram": "60%", "tile": "4KiB"},
}
"""Options of `Exported` for each kind of schedule."""

BATCH = {"autoencoder": (8,)}
"""Batch size; batch norm over only two values would amplify rounding errors."""

QUICK_BUILD = "EXTRA=-O0"
"""Settings of builds with sanitizers, whose compilation takes longer than a few steps."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of some training steps."""

    losses: list[float]
    tensors: dict[str, np.ndarray]
    """State by name, or gradients without an optimizer."""

    def differences(self, expected):
        """Return the largest difference of each kind, over the largest magnitude of the kind.

        Kinds are losses, parameters (or gradients), running statistics, and each moment.
        """
        assert self.tensors.keys() == expected.tensors.keys()
        pairs = {"loss": [(np.array(self.losses), np.array(expected.losses))]}
        for name, theirs in expected.tensors.items():
            pairs.setdefault(_kind(name), []).append((self.tensors[name], theirs))
        return {kind: _difference(each) for kind, each in pairs.items()}

    def same_bits(self, other):
        """Return whether losses and tensors are equal bit for bit."""
        return self.losses == other.losses and all(
            mine.tobytes() == other.tensors[name].tobytes() for name, mine in self.tensors.items()
        )


_KINDS = (
    "running_mean", "running_var", "num_batches_tracked", "momentum_buffer", "step", "exp_avg",
    "exp_avg_sq", "max_exp_avg_sq", "mu_product", "square_avg", "grad_avg", "sum",
)  # fmt: skip


def _kind(name):
    last = name.rpartition(".")[2]
    return last if last in _KINDS else "parameters"


def _difference(pairs):
    assert all(mine.shape == its.shape for mine, its in pairs)
    largest = max(float(np.abs(its).max(initial=0.0)) for _, its in pairs)
    apart = [float(np.abs(mine.astype(float) - its).max(initial=0.0)) for mine, its in pairs]
    worst = float("nan") if any(map(np.isnan, apart)) else max(apart)  # max() may pass over NaN
    return worst / largest if largest else worst


def batches_like(inputs, count, *, seed=1):
    """Return other batches of the same shapes; numbers have all digits of a double.

    Integers are permuted, so that they stay in their range.
    """
    make = torch.Generator().manual_seed(seed)

    def one(x):
        if x.is_floating_point():
            return torch.randn(x.shape, generator=make, dtype=torch.float64)
        return x.flatten()[torch.randperm(x.numel(), generator=make)].view(x.shape)

    return [tuple(map(one, inputs)) for _ in range(count)]


def torch_steps(training, batches, steps, optimizer="gradients", *, dtype=None):
    """Train a copy of a model with PyTorch, in double unless another type is wanted."""
    twin = _Twin(training, optimizer, dtype or torch.float64)
    losses = [twin.step(batches[number % len(batches)]) for number in range(steps)]
    return Outcome(losses, twin.tensors())


def torch_steps_from(training, batches, held, optimizer="gradients", *, rounded=False):
    """Return the result of each step in PyTorch, begun with the state of another program.

    The first begins with the model, the others with what is `held` after the one before; each
    outcome has the loss of one step. With `rounded` every parameter begins each step one rounding
    error away from its value.
    """
    twin = _Twin(training, optimizer, torch.float64)
    found = []
    for number in range(len(held)):
        if number:
            twin.hold(held[number - 1])
        if rounded:
            twin.round(torch.float64)
        loss = twin.step(batches[number % len(batches)])
        found.append(Outcome([loss], {n: x.copy() for n, x in twin.tensors().items()}))
    return found


def condition(training, batches, *, draws=8):
    """Return how far rounding parameters to floats may move loss and gradients, by kind.

    It is the worst of some draws, each of which moves every parameter by up to one rounding error
    of a float. PyTorch computes in double, so that all processors find the same.
    """
    exact = torch_steps(training, batches, 1)
    worst = dict.fromkeys(exact.differences(exact), 0.0)
    for seed in range(draws):
        twin = _Twin(training, "gradients", torch.float64)
        twin.round(torch.float32, torch.Generator().manual_seed(seed))
        found = Outcome([twin.step(batches[0])], twin.tensors()).differences(exact)
        worst = {kind: max(x, found[kind]) for kind, x in worst.items()}
    return worst


class _Twin:
    """A copy of a model that PyTorch trains."""

    def __init__(self, training, optimizer, dtype):
        model, self._loss_fn, _ = training
        self._dtype = dtype
        self._model = copy.deepcopy(model).to(dtype)
        make, self._clip = OPTIMIZERS[optimizer]
        with _numbers_of(dtype):
            self._updates = None if make is None else make(self._model.parameters())

    def step(self, batch):
        """Train with a batch, and return the loss."""
        self._model.zero_grad()
        inputs = tuple(_cast(x, self._dtype) for x in batch)
        loss = float(eager_step(self._model, self._loss_fn, inputs))
        if self._clip is not None:
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._clip)
        if self._updates is not None:
            with _numbers_of(self._dtype):
                self._updates.step()
        return loss

    def round(self, dtype, draw=None):
        """Move every parameter by one rounding error of a type, or by a drawn part of one."""
        for parameter in self._model.parameters():
            part = 1.0
            if draw is not None:
                part = 2 * torch.rand(parameter.shape, generator=draw, dtype=self._dtype) - 1
            parameter.data.mul_(1 + torch.finfo(dtype).eps * part)

    def hold(self, held):
        """Set parameters, buffers and moments to the values in `held`."""
        if self._updates is None:
            return
        state = self._state()
        assert state.keys() == held.tensors.keys()
        for name, mine in state.items():
            mine.detach().copy_(torch.tensor(held.tensors[name]))

    def tensors(self):
        """Return the state by name, or gradients without an optimizer."""
        if self._updates is None:
            return {name: _array(p.grad) for name, p in self._model.named_parameters()}
        return {name: _array(x) for name, x in self._state().items()}

    def _state(self):
        named = dict(self._model.named_parameters())
        found = {**named, **dict(self._model.named_buffers())}
        for name, parameter in named.items():
            kept = self._updates.state[parameter].items()
            found |= {f"{name}.{key}": x for key, x in kept if x is not None}
        return found


@contextmanager
def _numbers_of(dtype):
    """Let an optimizer keep its numbers, such as NAdam's product of momenta, in a type."""
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(torch.float32)


def _cast(x, dtype):
    return x.to(dtype) if x.is_floating_point() else x


def _array(x):
    return x.detach().cpu().numpy()


def lowered(training, optimizer="gradients", *, name=None):
    """Return a training step as calls of kernels; the optimizer is one of `OPTIMIZERS`."""
    model, loss_fn, inputs = training
    make, clip = OPTIMIZERS[optimizer]
    updates = None if make is None else make(model.parameters())
    return lower(model, loss_fn, inputs, name=name, optimizer=updates, clip_grad_norm=clip)


def _with_enough_flash(device):
    """Return a device whose flash takes any program; storage has as much of it as before."""
    board = Device.load(device) if isinstance(device, str) else device
    flash = board.flash
    return board if flash is None else replace(board, flash=replace(flash, size_bytes=2**40))


class Exported:
    """A training step exported as C, and its built programs.

    Parameters
    ----------
    step : LoweredStep
        What is computed.
    folder : Path
        Where it is exported to.
    share : float, optional
        The RAM for the arena, between the least that a node needs (0) and what keep-all does (1).
        Without paging all state is in RAM, and the least is as much more.
    **options
        Those of `export_step`, in place of `SCHEDULES`' "keep-all". The device has as much flash
        as the program takes.
    """

    def __init__(self, step, folder, *, share=None, **options):
        if share is not None:
            board = options.get("device")
            device = Device.load(board) if isinstance(board, str) else board
            paging = options.get("paging", True)
            commit = options.get("commit", False) or options.get("commit_every", 1) > 1
            stack = parse_stack(options.get("stack"), commit=commit)
            arena = _arena_bytes(step, share, device_alignment(device), paging=paging)
            options["ram"] = arena + reserved_bytes(step, stack)
        settings = {"device": DEFAULT_DEVICE, "gap": 0.5, "time_limit": 120.0}
        settings |= options or SCHEDULES["keep-all"]
        settings["device"] = _with_enough_flash(settings["device"])
        self.folder = folder
        self.deployment = export_step(step, folder, **settings)
        self.manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        self._built = {}
        """What the program of each target was built from and with, and where it is."""

    @property
    def ops(self):
        """Number of instructions of the program by kind; ``again`` counts recomputations."""
        plan = self.deployment.plan
        found = Counter(str(op) for op, _ in plan.program)
        found["again"] = found[str(Op.COMPUTE)] - len(self.deployment.step.graph.nodes)
        return found

    def run(self, batches, steps, *, target=Target.HOST_DOUBLE, settings=("POISON=1",), words=()):
        """Build and run; settings are variables of the Makefile, words go to ``pm_run``."""
        needs(target)
        return run_program(
            self._program(target, settings),
            target,
            self.folder,
            inputs=b"".join(self._bytes(batch, target) for batch in batches),
            steps=steps,
            learning_rate=float(self.manifest["learning_rate"] or 0.0),
            words=words,
        )

    def _program(self, target, settings):
        if target is Target.HOST_DOUBLE:
            settings = (*settings, QUICK_BUILD)
        key = (tuple(settings), (self.folder / "src" / "pm_step.c").stat().st_mtime_ns)
        if target not in self._built or self._built[target][0] != key:
            self._built[target] = (key, build(self.folder, target, settings=settings))
        return self._built[target][1]

    def outcome(self, batches, steps, *, target=Target.HOST_DOUBLE, **options):
        """Execute steps; return their results."""
        found = self.run(batches, steps, target=target, **options).require_success()
        values = self.manifest["states" if self.manifest["updates"] else "gradients"]
        tensors, place = {}, 0
        for value in values:
            kind, count = _type(value, target), int(np.prod(value["shape"], dtype=int))
            elements = np.frombuffer(found.state, kind, count, place)
            tensors[value["name"]] = elements.reshape(value["shape"])
            place += count * kind.itemsize
        assert place == len(found.state)
        return Outcome(list(found.losses.values()), tensors)

    def _bytes(self, batch, target):
        pairs = zip(self.manifest["inputs"], batch, strict=True)
        return b"".join(x.numpy().astype(_type(value, target)).tobytes() for value, x in pairs)


def _arena_bytes(step, share, alignment, *, paging):
    graph = align_sizes(step.graph, alignment)
    state = 0 if paging else sum(graph.tensor_bytes[i] for i in graph.state_tensors)
    most = checkpoint_all_peak_bytes(graph)
    least = min(most, floor(graph).bytes + state)
    return int(least + share * (most - least))


def _type(value, target):
    real = np.dtype("<f8" if target is Target.HOST_DOUBLE else "<f4")
    return real if value["dtype"] == "float32" else np.dtype(value["dtype"])
