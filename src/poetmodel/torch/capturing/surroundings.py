"""State of PyTorch during a capture: fake tensors, annotations, operators left whole.

Fake tensors lie in memory as real ones do, and those whose value is known have it.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import RLock
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
import torch._decomp  # registers the kernels that `native_operators` takes away
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx import traceback
from torch.fx.proxy import TracerBase
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils import _pytree, checkpoint
from torch.utils._mode_utils import no_dispatch

from poetmodel.torch.capturing.joint_graph import ANNOTATION, PLACE, shown_path
from poetmodel.torch.capturing.replay import temporarily
from poetmodel.torch.capturing.values import ASSERTS, Given, KnownValue, KnownValues
from poetmodel.torch.errors import RAISED, ForbiddenError, foreign_tensor_error, running_user_line
from poetmodel.torch.graph.tensors import storage_key, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import fx

ALONE: Final = RLock()
"""Held while something is captured or measured, for settings of PyTorch and of the process."""


def onednn(*, enabled: bool) -> AbstractContextManager[None]:
    """Turn the kernels of oneDNN on or off inside."""
    mkldnn = torch.backends.mkldnn
    return temporarily(partial(setattr, mkldnn, "enabled"), enabled, mkldnn.enabled)


# -- strides -----------------------------------------------------------------------------------


def fake_mode(values: KnownValues, *, mkldnn: bool) -> FakeTensorMode:
    """Return a mode whose fake tensors lie in memory as the real ones do, with oneDNN on or off.

    A fake tensor has the strides that a prediction of the kernel says, and some predictions are
    wrong: the real ``mse_loss_backward`` is contiguous whatever its inputs are. Whoever asks for a
    ``view`` or ``contiguous()`` then gets an answer that holds for the fake tensor alone: a view
    that cannot be made of the real one, or one copy more or less than eager makes, which changes
    the order of sums. So each new form of a call runs once on zeros that lie as its inputs do, and
    its outputs are given the strides that come out. An operation that fails on zeros keeps the
    predicted ones. `values` are known, and may be read.
    """
    # Real tensors that the code holds become constants.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # No subclass: PyTorch finds the rules of some operators by the very type of the mode.
    mode.dispatch = _RealStrides(mode, values, mkldnn=mkldnn)
    return mode


class _RealStrides:
    """Function of a fake mode for an operation: its own work, and the outputs then corrected."""

    def __init__(self, mode: FakeTensorMode, values: KnownValues, *, mkldnn: bool) -> None:
        self._mode = mode
        self._values = values
        self._predict = mode.dispatch
        self._mkldnn = mkldnn
        self._depth = 0
        self._known: dict[Any, Sequence[Any] | None] = {}

    def __call__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if not isinstance(func, OpOverload):
            return self._predict(func, types, args, keywords)
        _check_foreign(func, args, keywords)
        if func in ASSERTS:
            self._values.check(func, args[0])
        reads = torch.Tag.data_dependent_output in func.tags
        shapes = torch.Tag.dynamic_output_shape in func.tags
        inner = self._depth > 0
        known = None
        if reads or shapes or not inner:
            ways = self._values
            known = (ways.selected if shapes else ways.of)(func, args, keywords)
        if known is not None and (reads or shapes):
            if known.real is None:
                raise ForbiddenError(
                    "a random number is read{where} (an if, .item(), float(), ...), and a compiled "
                    "step would always do what it decided when it was captured; switch the random "
                    "choice off, or draw it outside of the step and give it as an input"
                )
            if reads:
                self._values.read(known, known.real)
                return known.real
            return self._of(known)
        self._depth += 1
        try:
            value = self._predicted(func, types, args, keywords)
        finally:
            self._depth -= 1
        if self._depth:  # what an operation is made of inside is its own affair
            return value
        value = self.corrected(func, args, keywords, value)
        self._values.remember(value, known)
        return value

    def _predicted(self, func: Any, types: Any, args: Any, keywords: Any) -> Any:
        """Return the outputs as PyTorch predicts them, or as they are on zeros."""
        if func.overloadpacket.__name__ in _BETTER_RUN:
            leaves, spec = _pytree.tree_flatten((args, keywords))
            outputs = _run_on_zeros(func, leaves, spec, mkldnn=self._mkldnn)
            if outputs is not None:
                return self._of(KnownValue(outputs, form_only=True))
        return self._predict(func, types, args, keywords)

    def _of(self, known: KnownValue) -> Any:
        """Return fake tensors of the form of real ones, which hold what is known of them."""

        def fake(real: torch.Tensor) -> torch.Tensor:
            return torch.empty_strided(real.shape, real.stride(), dtype=real.dtype)

        with self._mode:
            value = _pytree.tree_map_only(torch.Tensor, fake, known.real)
        self._values.remember(value, known)
        return value

    def corrected(self, func: Any, args: Any, keywords: Any, value: Any) -> Any:
        """Return the outputs with the strides of real ones."""
        leaves, spec = _pytree.tree_flatten(value)
        inputs = tensors_in((args, keywords))
        if any(tensor.layout != torch.strided for tensor in inputs):
            return value
        there = {storage_key(tensor) for tensor in inputs}
        new = [
            index
            for index, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor)
            and leaf.dim() > 1
            and leaf.device.type == "cpu"
            and leaf.layout == torch.strided
            and getattr(leaf, "constant", None) is None
            and storage_key(leaf) not in there
        ]
        if not new:
            return value
        forms = self._forms(func, args, keywords)
        if forms is None or len(forms) != len(leaves):
            return value
        for index in new:
            fake, form = leaves[index], forms[index]
            if form is not None and fake.shape == form[0] and fake.stride() != form[1]:
                with self._mode:
                    leaves[index] = torch.empty_strided(*form, dtype=fake.dtype, device=fake.device)
        return _pytree.tree_unflatten(leaves, spec)

    def _forms(self, func: Any, args: Any, keywords: Any) -> Sequence[Any] | None:
        """Return shape and strides of each output of a real call; None where none can be had."""
        leaves, spec = _pytree.tree_flatten((args, keywords))
        key = (func, spec, tuple(map(_form, leaves)))
        try:
            if key not in self._known:
                self._known[key] = _real_forms(func, leaves, spec, mkldnn=self._mkldnn)
        except TypeError:  # an argument that cannot be a part of a key
            return None
        return self._known[key]


def _check_foreign(func: OpOverload, args: Any, keywords: Any) -> None:
    """Raise `ForbiddenError` where a real tensor is written, or waits for a gradient."""
    for position, argument in enumerate(func._schema.arguments):  # noqa: SLF001 - what is written
        value = args[position] if position < len(args) else keywords.get(argument.name)
        for tensor in tensors_in(value):
            if isinstance(tensor, FakeTensor):
                continue
            if argument.alias_info is not None and argument.alias_info.is_write:
                raise foreign_tensor_error("is changed")
            if tensor.requires_grad and torch.is_grad_enabled():
                raise foreign_tensor_error("that requires a gradient is used")


_BETTER_RUN: Final = ("_grouped_mm",)
"""Operators whose prediction refuses types that the processor's kernel takes."""


def _form(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return (leaf.shape, leaf.stride(), leaf.dtype, leaf.device)
    return (type(leaf), leaf)


def _real_forms(
    func: Any, leaves: Sequence[Any], spec: Any, *, mkldnn: bool
) -> Sequence[Any] | None:
    """Return shape and strides of each output of an operation, seen on zeros."""
    outputs = _run_on_zeros(func, leaves, spec, mkldnn=mkldnn)
    if outputs is None:
        return None
    return [
        (output.shape, output.stride()) if isinstance(output, torch.Tensor) else None
        for output in _pytree.tree_leaves(outputs)
    ]


def _run_on_zeros(func: Any, leaves: Sequence[Any], spec: Any, *, mkldnn: bool) -> Any:
    """Run an operation on zeros; return what it gives, or None where it fails."""
    if any(isinstance(leaf, torch.Generator) for leaf in leaves):
        return None
    random = torch.random.fork_rng(devices=[])
    with no_dispatch(), torch.no_grad(), onednn(enabled=mkldnn), random:
        try:
            args, keywords = _pytree.tree_unflatten([_zeros(leaf) for leaf in leaves], spec)
            return func(*args, **keywords)
        except RAISED:
            return None


def _zeros(leaf: Any) -> Any:
    """Return zeros that lie as a fake tensor does; anything else as it is."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    reach = sum((size - 1) * step for size, step in zip(leaf.shape, leaf.stride(), strict=True))
    whole = torch.zeros(reach + 1 if leaf.numel() else 0, dtype=leaf.dtype)
    return whole.as_strided(leaf.shape, leaf.stride())


_MISPREDICTED: Final = frozenset(
    ("_fft_r2c", "_log_softmax_backward_data", "_native_batch_norm_legit",
     "_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training",
     "batch_norm_backward", "copysign", "div", "elu_backward", "floor_divide", "gelu_backward",
     "glu_backward", "hardsigmoid_backward", "hardswish_backward", "hardtanh_backward",
     "huber_loss_backward", "leaky_relu_backward", "log_sigmoid_backward", "log_sigmoid_forward",
     "max_unpool2d", "mish_backward", "mse_loss_backward", "native_batch_norm",
     "native_batch_norm_backward", "native_dropout_backward", "native_layer_norm_backward", "pow",
     "replication_pad2d_backward", "silu_backward", "smooth_l1_loss_backward", "softplus_backward",
     "softshrink_backward", "threshold_backward")
)  # fmt: skip
"""Operators whose results PyTorch predicts with other strides than their kernels make (2.13)."""


@contextmanager
def real_strides(inputs: Sequence[Any]) -> Iterator[None]:
    """Let the fake tensors of a capture of others lie as real ones do, where predictions are wrong.

    Views are taken of them otherwise that the real ones do not have.
    """
    mode = detect_fake_mode(inputs)
    if mode is None:
        yield
        return
    predict = mode.dispatch
    real = _RealStrides(mode, KnownValues(), mkldnn=torch.backends.mkldnn.enabled)

    def dispatch(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = predict(func, types, args, kwargs)
        if isinstance(func, OpOverload) and func.overloadpacket.__name__ in _MISPREDICTED:
            return real.corrected(func, args, kwargs or {}, value)
        return value

    mode.dispatch = dispatch
    try:
        yield
    finally:
        del mode.dispatch


# -- annotations, operators left whole ---------------------------------------------------------


@contextmanager
def annotated(
    stepped: torch.nn.Module, trail: list[str], check: Callable[[Sequence[str]], object]
) -> Iterator[None]:
    """Annotate every node that is recorded inside with its module, and the user's line that ran.

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
            named = f"module {shown!r} ({kind})" if shown else f"module {kind}"
            trail.append(named if path else "the loss function")

        return hook

    def leave(*_: Any) -> None:
        check(trail)
        open_contexts.pop().__exit__(None, None, None)
        trail.pop()

    record = TracerBase.create_node
    own_forward = type(stepped).forward.__code__.co_filename

    def located(tracer: TracerBase, *args: Any, **kwargs: Any) -> fx.Node:
        node = record(tracer, *args, **kwargs)
        if trail:
            line = running_user_line(sys._getframe(1), within=own_forward)  # noqa: SLF001
            notes = node.meta.get("custom") or {}
            path = shown_path(notes.get(ANNOTATION, ""))
            place = (f"module {path!r}" if path else trail[-1]) + (f" at {line}" if line else "")
            node.meta["custom"] = {**notes, PLACE: place}
        return node

    handles = []
    for path, module in stepped.named_modules():
        handles.append(module.register_forward_pre_hook(enter(path)))
        handles.append(module.register_forward_hook(leave))
    TracerBase.create_node = located
    try:
        yield
    finally:
        TracerBase.create_node = record
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
"""Names in ``torch.utils.checkpoint`` if it is not reentrant, later releases first."""


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
            trained = any(
                isinstance(value, torch.Tensor) and value.requires_grad for value in inputs
            )
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
    dropout = torch.ops.aten.dropout.default
    for key in (kinds.Autograd, kinds.CompositeImplicitAutograd):
        if key in dropout.py_kernels:
            kernel = dropout.py_kernels[key]
            taken.append((dropout, key, kernel))
            dropout.py_kernels[key] = partial(_dropout, kernel)
    dropout._dispatch_cache.clear()  # noqa: SLF001 - as above
    try:
        yield
    finally:
        for operator, key, kernel in taken:
            operator.py_kernels[key] = kernel
            operator._dispatch_cache.clear()  # noqa: SLF001 - as above


def _dropout(
    kernel: Callable[..., torch.Tensor],
    x: torch.Tensor,
    p: float,
    train: bool,  # noqa: FBT001 - as the operator
) -> torch.Tensor:
    """Return eager's result, which is no copy if nothing is dropped."""
    return kernel(x, p, train) if train and p != 0 else x


def _operators() -> Iterator[Any]:
    for name in dir(torch.ops.aten):
        if name in _NAMES or name.startswith(_PREFIXES):
            packet = getattr(torch.ops.aten, name)
            for overload in packet.overloads():
                yield getattr(packet, overload)


def drawing() -> AbstractContextManager[None]:
    """Keep operations that draw random numbers, as eager does, where nothing reads them."""
    config = torch._inductor.config  # noqa: SLF001 - what PyTorch asks before it takes them out
    return config.patch(fallback_random=True)  # type: ignore[no-any-return, unused-ignore]


@contextmanager
def refused_seeding() -> Iterator[None]:
    """Raise `ForbiddenError` where the generator is seeded inside; put its state back later."""
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

    def manual_seed(self, *_: int) -> NoReturn:
        raise ForbiddenError(
            "the random generator is seeded{where}; a compiled step draws what follows the state "
            "before it: seed outside of the step, or draw once and make the result a buffer"
        )

    seed = manual_seed
