"""State of PyTorch during a capture: fake tensors, annotations, operators left undecomposed.

Fake tensors get the strides of real tensors, and known values where they exist.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import RLock
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
import torch._decomp  # registers the kernels that `native_operators` removes
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx import traceback
from torch.fx.proxy import TracerBase
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils import _pytree, checkpoint
from torch.utils._mode_utils import no_dispatch

from poetmodel.torch.capturing.joint_graph import ANNOTATION, LOCATION, shown_path
from poetmodel.torch.capturing.replay import temporary_setting
from poetmodel.torch.capturing.values import ASSERTS, KnownValue, KnownValues, SourceTensor
from poetmodel.torch.errors import (
    FOREIGN_ERRORS,
    ForbiddenError,
    foreign_tensor_error,
    running_user_line,
)
from poetmodel.torch.graph.tensors import storage_key, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import fx

CAPTURE_LOCK: Final = RLock()
"""Held during captures and measurements, which change settings of PyTorch and of the process."""


def onednn(*, enabled: bool) -> AbstractContextManager[None]:
    """Context manager that turns the kernels of oneDNN on or off."""
    mkldnn = torch.backends.mkldnn
    return temporary_setting(partial(setattr, mkldnn, "enabled"), enabled, mkldnn.enabled)


# -- strides -----------------------------------------------------------------------------------


def fake_mode(values: KnownValues, *, mkldnn: bool) -> FakeTensorMode:
    """Return a fake mode whose tensors have the strides of real ones, with oneDNN on or off.

    PyTorch predicts the strides of fake tensors, and some predictions are wrong: the real
    ``mse_loss_backward`` is contiguous whatever its inputs are. Code that calls ``view`` or
    ``contiguous()`` would then be captured as it runs on the fake tensor only. The captured view
    may be impossible for the real tensor, or there may be one copy more or less than in eager,
    which changes the order of sums. Each new kind of call is therefore executed once on zeros with
    the strides of its inputs, and its fake outputs get the strides of the real outputs. If this
    fails, they keep the predicted ones. `values` has the known values and records reads.
    """
    # Real tensors that the code refers to become constants.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # No subclass: PyTorch selects the rules of some operators by the exact type of the mode.
    mode.dispatch = _RealStrides(mode, values, mkldnn=mkldnn)
    return mode


class _RealStrides:
    """Replaces a fake mode's dispatch: predicts outputs, then corrects strides and adds values."""

    def __init__(self, mode: FakeTensorMode, values: KnownValues, *, mkldnn: bool) -> None:
        self._mode = mode
        self._values = values
        self._predict = mode.dispatch
        self._mkldnn = mkldnn
        self._depth = 0
        self._layouts: dict[Any, Sequence[Any] | None] = {}

    def __call__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the fake outputs of an operation, or the value that Python reads."""
        keywords = kwargs or {}
        if not isinstance(func, OpOverload):
            return self._predict(func, types, args, keywords)
        _check_foreign(func, args, keywords)
        if func in ASSERTS:
            self._values.record_assert(func, args[0])
        is_read = torch.Tag.data_dependent_output in func.tags
        has_dynamic_shape = torch.Tag.dynamic_output_shape in func.tags
        is_inner = self._depth > 0
        known_value = None
        if is_read or has_dynamic_shape or not is_inner:
            values = self._values
            evaluate = values.evaluate_dynamic_shape if has_dynamic_shape else values.evaluate
            known_value = evaluate(func, args, keywords)
        if known_value is not None and (is_read or has_dynamic_shape):
            if known_value.real is None:
                raise ForbiddenError(
                    "a random number is read{where} (an if, .item(), float(), ...), and a compiled "
                    "step would always repeat the decision of the capture; turn the random choice "
                    "off, or draw it outside of the step and pass it as an input"
                )
            if is_read:
                self._values.record_read(known_value, known_value.real)
                return known_value.real
            return self._fake_outputs(known_value)
        self._depth += 1
        try:
            value = self._predict_outputs(func, types, args, keywords)
        finally:
            self._depth -= 1
        if self._depth:  # an operation inside another one needs no correction
            return value
        value = self.correct_strides(func, args, keywords, value)
        self._values.attach(value, known_value)
        return value

    def _predict_outputs(self, func: Any, types: Any, args: Any, keywords: Any) -> Any:
        """Return fake outputs as PyTorch predicts them, or like the results on zeros."""
        if func.overloadpacket.__name__ in _RUN_ON_ZEROS:
            leaves, spec = _pytree.tree_flatten((args, keywords))
            outputs = _run_on_zeros(func, leaves, spec, mkldnn=self._mkldnn)
            if outputs is not None:
                return self._fake_outputs(KnownValue(outputs, metadata_only=True))
        return self._predict(func, types, args, keywords)

    def _fake_outputs(self, known_value: KnownValue) -> Any:
        """Return fake tensors with the shapes and strides of known outputs, and their values."""

        def fake(real: torch.Tensor) -> torch.Tensor:
            return torch.empty_strided(real.shape, real.stride(), dtype=real.dtype)

        with self._mode:
            value = _pytree.tree_map_only(torch.Tensor, fake, known_value.real)
        self._values.attach(value, known_value)
        return value

    def correct_strides(self, func: Any, args: Any, keywords: Any, value: Any) -> Any:
        """Return fake outputs with the strides of real ones; views of inputs stay unchanged."""
        leaves, spec = _pytree.tree_flatten(value)
        inputs = tensors_in((args, keywords))
        if any(tensor.layout != torch.strided for tensor in inputs):
            return value
        input_keys = {storage_key(tensor) for tensor in inputs}
        new_outputs = [
            index
            for index, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor)
            and leaf.dim() > 1
            and leaf.device.type == "cpu"
            and leaf.layout == torch.strided
            and getattr(leaf, "constant", None) is None
            and storage_key(leaf) not in input_keys
        ]
        if not new_outputs:
            return value
        layouts = self._real_layouts(func, args, keywords)
        if layouts is None or len(layouts) != len(leaves):
            return value
        for index in new_outputs:
            fake, layout = leaves[index], layouts[index]
            if layout is not None and fake.shape == layout[0] and fake.stride() != layout[1]:
                with self._mode:
                    leaves[index] = torch.empty_strided(
                        *layout, dtype=fake.dtype, device=fake.device
                    )
        return _pytree.tree_unflatten(leaves, spec)

    def _real_layouts(self, func: Any, args: Any, keywords: Any) -> Sequence[Any] | None:
        """Return (shape, strides) of each output of a real call, cached; None if the call fails."""
        leaves, spec = _pytree.tree_flatten((args, keywords))
        key = (func, spec, tuple(map(_layout_key, leaves)))
        try:
            if key not in self._layouts:
                self._layouts[key] = _measure_layouts(func, leaves, spec, mkldnn=self._mkldnn)
        except TypeError:  # an argument that cannot be hashed
            return None
        return self._layouts[key]


def _check_foreign(func: OpOverload, args: Any, keywords: Any) -> None:
    """Raise `ForbiddenError` if a real tensor is written, or used with a gradient."""
    for position, argument in enumerate(func._schema.arguments):  # noqa: SLF001 - has the writes
        value = args[position] if position < len(args) else keywords.get(argument.name)
        for tensor in tensors_in(value):
            if isinstance(tensor, FakeTensor):
                continue
            if argument.alias_info is not None and argument.alias_info.is_write:
                raise foreign_tensor_error("is changed")
            if tensor.requires_grad and torch.is_grad_enabled():
                raise foreign_tensor_error("that requires a gradient is used")


_RUN_ON_ZEROS: Final = ("_grouped_mm",)
"""Operators whose prediction rejects types that the CPU kernel supports."""


def _layout_key(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return (leaf.shape, leaf.stride(), leaf.dtype, leaf.device)
    return (type(leaf), leaf)


def _measure_layouts(
    func: Any, leaves: Sequence[Any], spec: Any, *, mkldnn: bool
) -> Sequence[Any] | None:
    """Run an operation on zeros; return (shape, strides) of each output. None if the call fails."""
    outputs = _run_on_zeros(func, leaves, spec, mkldnn=mkldnn)
    if outputs is None:
        return None
    return [
        (output.shape, output.stride()) if isinstance(output, torch.Tensor) else None
        for output in _pytree.tree_leaves(outputs)
    ]


def _run_on_zeros(func: Any, leaves: Sequence[Any], spec: Any, *, mkldnn: bool) -> Any:
    """Run an operation on zeros; return the outputs, or None if the operation fails."""
    if any(isinstance(leaf, torch.Generator) for leaf in leaves):
        return None
    random = torch.random.fork_rng(devices=[])
    with no_dispatch(), torch.no_grad(), onednn(enabled=mkldnn), random:
        try:
            args, keywords = _pytree.tree_unflatten([_zeros_like(leaf) for leaf in leaves], spec)
            return func(*args, **keywords)
        except FOREIGN_ERRORS:
            return None


def _zeros_like(leaf: Any) -> Any:
    """Return zeros with the shape and strides of a fake tensor; other objects as they are."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    reach = sum((size - 1) * step for size, step in zip(leaf.shape, leaf.stride(), strict=True))
    memory = torch.zeros(reach + 1 if leaf.numel() else 0, dtype=leaf.dtype)
    return memory.as_strided(leaf.shape, leaf.stride())


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
"""Operators whose kernels return other strides than PyTorch 2.13 predicts."""


@contextmanager
def real_strides(inputs: Sequence[Any]) -> Iterator[None]:
    """Context manager that corrects the strides of fake tensors in another library's capture.

    Only operators with wrong predictions are corrected. Otherwise views would be captured that are
    impossible for the real tensors. Has no effect without a fake mode in `inputs`.
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
            return real.correct_strides(func, args, kwargs or {}, value)
        return value

    mode.dispatch = dispatch
    try:
        yield
    finally:
        del mode.dispatch


# -- annotations, operators left undecomposed --------------------------------------------------


@contextmanager
def annotate_nodes(
    captured_module: torch.nn.Module,
    module_trail: list[str],
    check: Callable[[Sequence[str]], object],
) -> Iterator[None]:
    """Context manager that annotates each recorded node with its module and the user's line.

    Has no effect in PyTorch 2.9, which lacks annotations; names then contain the operator only.
    `module_trail` gets the modules that are being executed, the innermost last. It keeps them after
    an exception.
    `check` is called with the trail at the begin and end of each module.
    """
    annotate = getattr(traceback, "annotate", None)
    if annotate is None:
        yield
        return
    open_contexts: list[Any] = []
    module_trail.clear()

    def enter(path: str) -> Callable[..., None]:
        """Return a hook that annotates the nodes of a module from now on."""

        def hook(module: torch.nn.Module, *_: Any) -> None:
            """Annotate further nodes with `path`, and append the module to the trail."""
            check(module_trail)
            context = annotate({ANNOTATION: path})
            context.__enter__()
            open_contexts.append(context)
            display_path = shown_path(path)
            kind = type(module).__name__
            text = f"module {display_path!r} ({kind})" if display_path else f"module {kind}"
            module_trail.append(text if path else "the loss function")

        return hook

    def leave(*_: Any) -> None:
        """End the annotation of the innermost module; a forward hook."""
        check(module_trail)
        open_contexts.pop().__exit__(None, None, None)
        module_trail.pop()

    record = TracerBase.create_node
    own_forward = type(captured_module).forward.__code__.co_filename

    def create_annotated(tracer: TracerBase, *args: Any, **kwargs: Any) -> fx.Node:
        """Create a node, annotated with the current module and line."""
        node = record(tracer, *args, **kwargs)
        if module_trail:
            line = running_user_line(sys._getframe(1), within=own_forward)  # noqa: SLF001
            notes = node.meta.get("custom") or {}
            path = shown_path(notes.get(ANNOTATION, ""))
            location = f"module {path!r}" if path else module_trail[-1]
            location += f" at {line}" if line else ""
            node.meta["custom"] = {**notes, LOCATION: location}
        return node

    handles = []
    for path, module in captured_module.named_modules():
        handles.append(module.register_forward_pre_hook(enter(path)))
        handles.append(module.register_forward_hook(leave))
    TracerBase.create_node = create_annotated
    try:
        yield
    finally:
        TracerBase.create_node = record
        for handle in handles:
            handle.remove()
        while open_contexts:
            open_contexts.pop().__exit__(None, None, None)


@contextmanager
def known_values(
    captured_module: torch.nn.Module, inputs: Sequence[Any], values: KnownValues
) -> Iterator[None]:
    """Context manager that attaches the values of inputs and buffers in each forward pass."""
    buffers = {
        path: b.detach() for path, b in captured_module.named_buffers(remove_duplicate=False)
    }
    reals = [value.detach() if isinstance(value, torch.Tensor) else None for value in inputs]

    def hook(_: torch.nn.Module, flat: Sequence[Any]) -> None:
        """Attach the known values to the fake inputs and buffers; a forward pre-hook."""
        for position, (fake, real) in enumerate(zip(flat, reals, strict=True)):
            if real is not None:
                values.attach_source(fake, real, SourceTensor(position))
        for path, fake in captured_module.named_buffers(remove_duplicate=False):
            values.attach_source(fake, buffers[path], SourceTensor(None, path))

    handle = captured_module.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


_GENERATORS: Final = (
    "_checkpoint_without_reentrant_generator_impl",  # from PyTorch 2.14 on
    "_checkpoint_without_reentrant_generator",
)
"""Names of the non-reentrant generator in ``torch.utils.checkpoint``, later releases first."""


@contextmanager
def checkpoints_as_eager(captured_module: torch.nn.Module) -> Iterator[None]:
    """Context manager that removes ``torch.utils.checkpoint``, with the results of eager.

    A compiled step decides its recomputations itself. Reentrant checkpoints cannot be captured, and
    are replaced by a plain call, with gradients if an input requires one. In its backward pass
    eager executes a checkpointed function again, which updates the statistics of a norm once more.
    Therefore the statistics are updated here once more per enclosing checkpoint.
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

    def update_again(norm: Any, inputs: Any, output: torch.Tensor) -> None:
        """Update a norm's statistics once more per enclosing checkpoint."""
        if norm.training and norm.track_running_stats and output.requires_grad:
            norm_class = _BatchNorm if isinstance(norm, _BatchNorm) else _InstanceNorm
            with torch.no_grad():
                for _ in range(depth):
                    norm_class.forward(norm, *inputs)

    class Reentrant:
        """Stands for ``CheckpointFunction``: calls the function without a checkpoint."""

        @staticmethod
        def apply(function: Callable[..., Any], _: bool, *inputs: Any) -> Any:  # noqa: FBT001
            has_gradient = any(
                isinstance(value, torch.Tensor) and value.requires_grad for value in inputs
            )
            with inside(), torch.set_grad_enabled(has_gradient and torch.is_grad_enabled()):
                return function(*inputs)

    def nonreentrant(*arguments: Any, **keywords: Any) -> Iterator[None]:
        with inside():
            yield from generator(*arguments, **keywords)

    name_here = next(name for name in _GENERATORS if hasattr(checkpoint, name))
    generator = getattr(checkpoint, name_here)
    names = {"CheckpointFunction": Reentrant, name_here: nonreentrant}
    norms = [module for module in captured_module.modules() if isinstance(module, _NormBase)]
    handles = [norm.register_forward_hook(update_again) for norm in norms]
    try:
        with ExitStack() as stack:
            for name, value in names.items():
                setter = partial(setattr, checkpoint, name)
                stack.enter_context(temporary_setting(setter, value, getattr(checkpoint, name)))
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
"""Operators that a capture would decompose, with different rounding or strides."""


@contextmanager
def native_operators() -> Iterator[None]:
    """Context manager that prevents decompositions whose results differ from eager.

    During tracing PyTorch's dispatcher first looks for Python kernels of an operator. Some replace
    the operator by others: ``upsample_nearest2d`` becomes an index. The gradient of the index has
    other strides, so that its sums have another order. Kernels that a capture needs (batch norm)
    remain, and kernels with identical results.
    """
    keys = torch._C.DispatchKey  # noqa: SLF001 - as PyTorch's own registrations
    removed_kernels: list[tuple[Any, Any, Any]] = []
    for operator in _operators():
        for key in (keys.Autograd, keys.CompositeImplicitAutograd):
            if key in operator.py_kernels:
                removed_kernels.append((operator, key, operator.py_kernels.pop(key)))
        operator._dispatch_cache.clear()  # noqa: SLF001 - no other way
    dropout = torch.ops.aten.dropout.default
    for key in (keys.Autograd, keys.CompositeImplicitAutograd):
        if key in dropout.py_kernels:
            kernel = dropout.py_kernels[key]
            removed_kernels.append((dropout, key, kernel))
            dropout.py_kernels[key] = partial(_dropout, kernel)
    dropout._dispatch_cache.clear()  # noqa: SLF001 - as above
    try:
        yield
    finally:
        for operator, key, kernel in removed_kernels:
            operator.py_kernels[key] = kernel
            operator._dispatch_cache.clear()  # noqa: SLF001 - as above


def _dropout(
    kernel: Callable[..., torch.Tensor],
    x: torch.Tensor,
    p: float,
    train: bool,  # noqa: FBT001 - as the operator
) -> torch.Tensor:
    """Call a dropout kernel; return the input itself, like eager, if no element is dropped."""
    return kernel(x, p, train) if train and p != 0 else x


def _operators() -> Iterator[Any]:
    for name in dir(torch.ops.aten):
        if name in _NAMES or name.startswith(_PREFIXES):
            packet = getattr(torch.ops.aten, name)
            for overload in packet.overloads():
                yield getattr(packet, overload)


def retained_draws() -> AbstractContextManager[None]:
    """Context manager that retains unread random operations, which eager executes too."""
    config = torch._inductor.config  # noqa: SLF001 - PyTorch reads it before it removes them
    return config.patch(fallback_random=True)  # type: ignore[no-any-return, unused-ignore]


@contextmanager
def refuse_seeding() -> Iterator[None]:
    """Context manager that raises `ForbiddenError` on seeding, and restores the random state."""
    generator = torch.default_generator
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed and torch.seed call the generator. The functions themselves must not be
        # replaced, because PyTorch may build tables of them meanwhile.
        torch.default_generator = torch.random.default_generator = _Unseedable(generator)
        try:
            yield
        finally:
            torch.default_generator = torch.random.default_generator = generator


class _Unseedable:
    """Wraps a random generator, but refuses to seed it."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def manual_seed(self, *_: int) -> NoReturn:
        raise ForbiddenError(
            "the random generator is seeded{where}; a compiled step continues from the current "
            "state: seed outside of the step, or draw once and make the result a buffer"
        )

    seed = manual_seed
