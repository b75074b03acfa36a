"""What is in force while PyTorch captures: annotations, known values, operators left whole."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
import torch._decomp  # registers the kernels that `native_operators` takes away
from torch.fx import traceback
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils import checkpoint

from poetmodel.torch.errors import SeedError
from poetmodel.torch.graph_signature import ANNOTATION, shown_path
from poetmodel.torch.interpreter import temporarily
from poetmodel.torch.known_values import Given

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from poetmodel.torch.known_values import KnownValues


@contextmanager
def annotated(
    stepped: torch.nn.Module, trail: list[str], check: Callable[[Sequence[str]], object]
) -> Iterator[None]:
    """Let every node that is recorded inside carry the path of the module it came from.

    PyTorch 2.9 cannot do that; names then say the operator only. The modules that run when
    something is raised are left in the trail, the innermost one last; it is checked where one of
    them begins and ends.
    """
    annotate = getattr(traceback, "annotate", None)
    if annotate is None:
        yield
        return
    open_contexts: list[Any] = []
    trail.clear()

    def enter(path: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, *_: Any) -> None:
            check(trail)
            context = annotate({ANNOTATION: path})
            context.__enter__()
            open_contexts.append(context)
            shown = shown_path(path)
            kind = type(module).__name__
            trail.append(f"module {shown!r} ({kind})" if shown else f"module {kind}")

        return hook

    def leave(*_: Any) -> None:
        check(trail)
        open_contexts.pop().__exit__(None, None, None)
        trail.pop()

    handles = []
    for path, module in stepped.named_modules():
        handles.append(module.register_forward_pre_hook(enter(path)))
        handles.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        while open_contexts:
            open_contexts.pop().__exit__(None, None, None)


@contextmanager
def values_given(
    stepped: torch.nn.Module, inputs: Sequence[Any], values: KnownValues
) -> Iterator[None]:
    """Let the values of inputs and buffers be known to each forward pass inside."""
    buffers = {path: b.detach() for path, b in stepped.named_buffers(remove_duplicate=False)}
    reals = [value.detach() if isinstance(value, torch.Tensor) else None for value in inputs]

    def hook(_: torch.nn.Module, flat: Sequence[Any]) -> None:
        for position, (fake, real) in enumerate(zip(flat, reals, strict=True)):
            if real is not None:
                values.give(fake, real, Given(position))
        for path, fake in stepped.named_buffers(remove_duplicate=False):
            values.give(fake, buffers[path], Given(None, path))

    handle = stepped.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


_GENERATORS: Final = (
    "_checkpoint_without_reentrant_generator_impl",  # from PyTorch 2.14 on
    "_checkpoint_without_reentrant_generator",
)
"""What ``torch.utils.checkpoint`` calls where it is not reentrant, later releases first."""


@contextmanager
def followed_checkpoints(stepped: torch.nn.Module) -> Iterator[None]:
    """Let what runs inside of ``torch.utils.checkpoint`` have the results that it has in eager.

    A step decides itself what it computes again. The reentrant kind, which cannot be captured, is
    taken as the other one: its part is trained if one of its inputs is. Eager runs a part again in
    its backward pass, which updates the statistics of a norm once more: so it is done here, for
    each checkpoint around it.
    """
    depth = 0

    @contextmanager
    def inside() -> Iterator[None]:
        nonlocal depth
        depth += 1
        try:
            yield
        finally:
            depth -= 1

    def updated_again(norm: Any, inputs: Any, output: torch.Tensor) -> None:
        if norm.training and norm.track_running_stats and output.requires_grad:
            plain = _BatchNorm if isinstance(norm, _BatchNorm) else _InstanceNorm
            with torch.no_grad():
                for _ in range(depth):
                    plain.forward(norm, *inputs)

    class Reentrant:
        @staticmethod
        def apply(function: Callable[..., Any], _: bool, *inputs: Any) -> Any:  # noqa: FBT001
            trained = any(isinstance(each, torch.Tensor) and each.requires_grad for each in inputs)
            with inside(), torch.set_grad_enabled(trained and torch.is_grad_enabled()):
                return function(*inputs)

    def other(*arguments: Any, **keywords: Any) -> Iterator[None]:
        with inside():
            yield from generator(*arguments, **keywords)

    called = next(name for name in _GENERATORS if hasattr(checkpoint, name))
    generator = getattr(checkpoint, called)
    names = {"CheckpointFunction": Reentrant, called: other}
    norms = [module for module in stepped.modules() if isinstance(module, _NormBase)]
    handles = [norm.register_forward_hook(updated_again) for norm in norms]
    try:
        with ExitStack() as stack:
            for name, value in names.items():
                put = partial(setattr, checkpoint, name)
                stack.enter_context(temporarily(put, value, getattr(checkpoint, name)))
            yield
    finally:
        for handle in handles:
            handle.remove()


_PREFIXES: Final = ("upsample_", "_upsample_")
_NAMES: Final = (
    "gru",
    "hardshrink",
    "istft",
    "lstm",
    "matmul",
    "multi_margin_loss",
    "multilabel_margin_loss_forward",
    "rnn_relu",
    "rnn_tanh",
    "softshrink",
    "stft",
)
"""Operators that a capture would decompose into others, with other roundings or strides."""


@contextmanager
def native_operators() -> Iterator[None]:
    """Leave operators whole that a capture would decompose otherwise than eager does.

    While it traces, PyTorch's dispatcher looks for Python kernels of an operator first. Some
    put other operators in place of one: ``upsample_nearest2d`` becomes an index, whose gradient
    lies otherwise in memory, so that sums of it run in another order. The kernels that stay are
    those that a capture needs (batch norm), and those that compute the very same.
    """
    kinds = torch._C.DispatchKey  # noqa: SLF001 - as PyTorch's own registrations
    taken: list[tuple[Any, Any, Any]] = []
    for operator in _operators():
        for key in (kinds.Autograd, kinds.CompositeImplicitAutograd):
            if key in operator.py_kernels:
                taken.append((operator, key, operator.py_kernels.pop(key)))
        operator._dispatch_cache.clear()  # noqa: SLF001 - no other way
    try:
        yield
    finally:
        for operator, key, kernel in taken:
            operator.py_kernels[key] = kernel
            operator._dispatch_cache.clear()  # noqa: SLF001 - as above


def _operators() -> Iterator[Any]:
    for name in dir(torch.ops.aten):
        if name in _NAMES or name.startswith(_PREFIXES):
            packet = getattr(torch.ops.aten, name)
            for overload in packet.overloads():
                yield getattr(packet, overload)


@contextmanager
def refused_seeding() -> Iterator[None]:
    """Raise `SeedError` where the generator is seeded inside; put its state back afterwards."""
    generator = torch.default_generator
    with torch.random.fork_rng(devices=[]):
        # What torch.manual_seed and torch.seed call; the functions themselves must stay, because
        # PyTorch keeps tables of them, which it may make inside.
        torch.default_generator = torch.random.default_generator = _Unseedable(generator)
        try:
            yield
        finally:
            torch.default_generator = torch.random.default_generator = generator


class _Unseedable:
    """A random generator that cannot be seeded."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def manual_seed(self, _: int) -> NoReturn:
        raise SeedError

    def seed(self) -> NoReturn:
        raise SeedError
