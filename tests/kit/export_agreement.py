"""Comparison of exported C with PyTorch; needs PyTorch and a C compiler."""

import copy
import json
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch

from kit.eager_steps import run_eager_step
from kit.programs import require_programs
from kit.shared_objects import build
from poetmodel.device import Device
from poetmodel.export.board import Target, run_program
from poetmodel.export.exporting import export_step
from poetmodel.export.options import DEFAULT_DEVICE
from poetmodel.export.reserves import parse_stack, reserved_bytes
from poetmodel.graph import checkpoint_all_peak_bytes, floor
from poetmodel.plan import Op
from poetmodel.plan.alignment import align_sizes, device_alignment
from poetmodel.torch.lowering.step import lower

SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW


def two_groups(parameters, *, factor=1.0):
    """Return SGD of two groups, each with every other parameter.

    Learning rates, multiplied by `factor`, and weight decays differ.
    """
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
"""Function from parameters to an optimizer, and maximum norm of gradients, by name.

None is no optimizer, or no clipping. `eps` is larger than by default: gradients of layers before a
batch norm may be only rounding errors, by whose size Adam divides.
"""

SCHEDULES = {
    "keep-all": {"ram": "101%", "paging": False, "recompute": False},  # 1 % for fragmentation
    "recomputed": {"share": 0.3, "paging": False},
    "blocking": {"share": 0.2},
    "dma": {"share": 0.2, "device": "stm32h743"},
    "mapped": {"share": 0.1, "device": "nano33ble"},
    "tiles": {"ram": "60%", "tile": "4KiB"},
}
"""Options of `Exported` by kind of schedule."""

BATCH = {"autoencoder": (8,)}
"""Batch sizes by network; batch norm over only two values would amplify rounding errors."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Losses of training steps, and the tensors after the last step."""

    losses: list[float]
    tensors: dict[str, np.ndarray]
    """State by name or, without an optimizer, gradients by name of the parameter."""

    def differences(self, expected):
        """Return the maximum difference of each kind, relative to the kind's maximum magnitude.

        Kinds are "loss", "parameters" (or gradients), each running statistic and each moment. A
        difference is NaN if a value is.
        """
        assert self.tensors.keys() == expected.tensors.keys()
        pairs = {"loss": [(np.array(self.losses), np.array(expected.losses))]}
        for name, theirs in expected.tensors.items():
            pairs.setdefault(_kind_of(name), []).append((self.tensors[name], theirs))
        return {kind: _difference(each) for kind, each in pairs.items()}

    def has_same_bits(self, other):
        """Return whether losses are equal, and tensors bit for bit."""
        return self.losses == other.losses and all(
            mine.tobytes() == other.tensors[name].tobytes() for name, mine in self.tensors.items()
        )


_KINDS = (
    "running_mean", "running_var", "num_batches_tracked", "momentum_buffer", "step", "exp_avg",
    "exp_avg_sq", "max_exp_avg_sq", "mu_product", "square_avg", "grad_avg", "sum",
)  # fmt: skip


def _kind_of(name):
    last = name.rpartition(".")[2]
    return last if last in _KINDS else "parameters"


def _difference(pairs):
    assert all(mine.shape == its.shape for mine, its in pairs)
    largest = max(float(np.abs(its).max(initial=0.0)) for _, its in pairs)
    apart = [float(np.abs(mine.astype(float) - its).max(initial=0.0)) for mine, its in pairs]
    worst = float("nan") if any(map(np.isnan, apart)) else max(apart)  # max() may pass over NaN
    return worst / largest if largest else worst


def make_batches_like(inputs, count, *, seed=1):
    """Return `count` random batches with the shapes of `inputs`, reals in double precision.

    Integers are permuted, so that they stay in their range.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(x):
        if x.is_floating_point():
            return torch.randn(x.shape, generator=generator, dtype=torch.float64)
        return x.flatten()[torch.randperm(x.numel(), generator=generator)].view(x.shape)

    return [tuple(map(draw, inputs)) for _ in range(count)]


def train_in_torch(training, batches, steps, optimizer="gradients", *, dtype=None):
    """Train a copy of a model in PyTorch for `steps` steps; return losses and final tensors.

    `dtype` is the type of reals, by default double. Batches repeat.
    """
    twin = _Twin(training, optimizer, dtype or torch.float64)
    losses = [twin.step(batches[number % len(batches)]) for number in range(steps)]
    return Outcome(losses, twin.tensors())


def train_in_torch_from(training, batches, held, optimizer="gradients", *, rounded=False):
    """Return the outcome of each step in PyTorch, each from the state of another program.

    `held` are that program's outcomes after each step. The first step begins with the model, every
    other one with the outcome before it. With `rounded`, each step begins with parameters moved by
    one rounding error.
    """
    twin = _Twin(training, optimizer, torch.float64)
    found = []
    for number in range(len(held)):
        if number:
            twin.restore(held[number - 1])
        if rounded:
            twin.round(torch.float64)
        loss = twin.step(batches[number % len(batches)])
        found.append(Outcome([loss], {n: x.copy() for n, x in twin.tensors().items()}))
    return found


def measure_condition(training, batches, *, draws=8):
    """Return the maximum relative change of loss and gradients, by kind, over random roundings.

    Each of `draws` moves every parameter by up to one rounding error of a float. PyTorch computes
    in double, so that the result is the same on all processors.
    """
    exact = train_in_torch(training, batches, 1)
    worst = dict.fromkeys(exact.differences(exact), 0.0)
    for seed in range(draws):
        twin = _Twin(training, "gradients", torch.float64)
        twin.round(torch.float32, torch.Generator().manual_seed(seed))
        found = Outcome([twin.step(batches[0])], twin.tensors()).differences(exact)
        worst = {kind: max(x, found[kind]) for kind, x in worst.items()}
    return worst


class _Twin:
    """A copy of a model, which PyTorch trains with reals of a type."""

    def __init__(self, training, optimizer, dtype):
        model, self._loss_fn, _ = training
        self._dtype = dtype
        self._model = copy.deepcopy(model).to(dtype)
        make, self._clip = OPTIMIZERS[optimizer]
        with _default_type(dtype):
            self._updates = None if make is None else make(self._model.parameters())

    def step(self, batch):
        """Train on a batch; return the loss."""
        self._model.zero_grad()
        inputs = tuple(_cast(x, self._dtype) for x in batch)
        loss = float(run_eager_step(self._model, self._loss_fn, inputs))
        if self._clip is not None:
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._clip)
        if self._updates is not None:
            with _default_type(self._dtype):
                self._updates.step()
        return loss

    def round(self, dtype, draw=None):
        """Move every parameter by one rounding error of a type, or with `draw` by up to one."""
        for parameter in self._model.parameters():
            fraction = 1.0
            if draw is not None:
                fraction = 2 * torch.rand(parameter.shape, generator=draw, dtype=self._dtype) - 1
            parameter.data.mul_(1 + torch.finfo(dtype).eps * fraction)

    def restore(self, outcome):
        """Set parameters, buffers and moments to an outcome's; no effect without an optimizer."""
        if self._updates is None:
            return
        state = self._state()
        assert state.keys() == outcome.tensors.keys()
        for name, mine in state.items():
            mine.detach().copy_(torch.tensor(outcome.tensors[name]))

    def tensors(self):
        """Return the state by name or, without an optimizer, the gradients."""
        if self._updates is None:
            return {name: _array(p.grad) for name, p in self._model.named_parameters()}
        return {name: _array(x) for name, x in self._state().items()}

    def _state(self):
        named = dict(self._model.named_parameters())
        found = {**named, **dict(self._model.named_buffers())}
        for name, parameter in named.items():
            moments = self._updates.state[parameter].items()
            found |= {f"{name}.{key}": x for key, x in moments if x is not None}
        return found


@contextmanager
def _default_type(dtype):
    """Context manager: set PyTorch's default type, of numbers of optimizers; then float32."""
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(torch.float32)


def _cast(x, dtype):
    return x.to(dtype) if x.is_floating_point() else x


def _array(x):
    return x.detach().cpu().numpy()


def lower_training(training, optimizer="gradients", *, name=None):
    """Return the lowered step of a training step and an optimizer of `OPTIMIZERS`."""
    model, loss_fn, inputs = training
    make, clip = OPTIMIZERS[optimizer]
    updates = None if make is None else make(model.parameters())
    return lower(model, loss_fn, inputs, name=name, optimizer=updates, clip_grad_norm=clip)


def _with_enough_flash(device):
    """Return a device whose flash fits any program, with unchanged storage."""
    board = Device.load(device) if isinstance(device, str) else device
    flash = board.flash
    return board if flash is None else replace(board, flash=replace(flash, size_bytes=2**40))


class Exported:
    """A training step exported as C, and its built programs.

    Parameters
    ----------
    step : LoweredStep
        The step to export.
    folder : Path
        The folder to write.
    share : float, optional
        RAM for the arena, from the minimum RAM (0) to the keep-all peak (1). Without paging, all
        state is in RAM, and added to the minimum.
    **options
        Those of `export_step`, by default "keep-all" of `SCHEDULES`. The flash of the device is
        enlarged so that the program fits.
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
        """By target: (settings and time of the source that were built, path of the program)."""

    @property
    def ops(self):
        """Number of instructions of the plan by kind; ``again`` counts recomputations."""
        plan = self.deployment.plan
        found = Counter(str(op) for op, _ in plan.program)
        found["again"] = found[str(Op.COMPUTE)] - len(self.deployment.step.graph.nodes)
        return found

    def run(self, batches, steps, *, target=Target.HOST_DOUBLE, settings=("POISON=1",), words=()):
        """Build the program, and train; return the program's results.

        `settings` are variables of the Makefile, `words` further arguments of ``pm_run``.
        """
        require_programs(target)
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
        key = (tuple(settings), (self.folder / "src" / "pm_step.c").stat().st_mtime_ns)
        if target not in self._built or self._built[target][0] != key:
            self._built[target] = (key, build(self.folder, target, settings=settings))
        return self._built[target][1]

    def outcome(self, batches, steps, *, target=Target.HOST_DOUBLE, **options):
        """Build the program, and train without an error; return losses and final tensors."""
        found = self.run(batches, steps, target=target, **options).require_success()
        values = self.manifest["states" if self.manifest["updates"] else "gradients"]
        tensors, place = {}, 0
        for value in values:
            kind, count = _numpy_type(value, target), int(np.prod(value["shape"], dtype=int))
            elements = np.frombuffer(found.state, kind, count, place)
            tensors[value["name"]] = elements.reshape(value["shape"])
            place += count * kind.itemsize
        assert place == len(found.state)
        return Outcome(list(found.losses.values()), tensors)

    def _bytes(self, batch, target):
        pairs = zip(self.manifest["inputs"], batch, strict=True)
        return b"".join(
            x.numpy().astype(_numpy_type(value, target)).tobytes() for value, x in pairs
        )


def _arena_bytes(step, share, alignment, *, paging):
    graph = align_sizes(step.graph, alignment)
    state = 0 if paging else sum(graph.tensor_bytes[i] for i in graph.state_tensors)
    high = checkpoint_all_peak_bytes(graph)
    low = min(high, floor(graph).bytes + state)
    return int(low + share * (high - low))


def _numpy_type(value, target):
    real = np.dtype("<f8" if target is Target.HOST_DOUBLE else "<f4")
    return real if value["dtype"] == "float32" else np.dtype(value["dtype"])
