"""Context of PyTorch during a capture: fake tensors, annotations, checkpoints, operators, seeding.

Fake tensors get the strides of real tensors, and known values.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from threading import RLock
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
from torch.utils import _pytree
from torch.utils._mode_utils import no_dispatch

from poetmodel.torch.capturing.front_private import (
    DispatchKey,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    detect_fake_mode,
)
from poetmodel.torch.capturing.process_state import temporary_setting
from poetmodel.torch.capturing.values import (
    ASSERTS,
    LINALG_CHECK,
    KnownValue,
    KnownValues,
    SourceTensor,
)
from poetmodel.torch.errors import (
    FOREIGN_ERRORS,
    ForbiddenError,
    foreign_tensor_error,
)
from poetmodel.torch.graph.tensors import storage_key, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager


CAPTURE_LOCK: Final = RLock()
"""Held by `compile` and the back end of ``torch.compile``, because captures and measurements change
settings of PyTorch and of the process."""


def onednn_kernels(*, enabled: bool) -> AbstractContextManager[None]:
    """Context manager that turns oneDNN kernels on or off, and restores the old setting."""
    backend = torch.backends.mkldnn
    return temporary_setting(partial(setattr, backend, "enabled"), enabled, backend.enabled)


# -- strides -----------------------------------------------------------------------------------


def make_fake_mode(values: KnownValues, *, uses_onednn: bool) -> FakeTensorMode:
    """Return a fake mode whose tensors have the strides of real ones, with or without oneDNN.

    Some predicted strides are wrong: a captured ``view`` may be impossible for the real tensor, or
    a copy more or less changes the order of sums. Therefore each operation that returns new CPU
    tensors of two or more dimensions is executed on zeros, once for equal arguments. Known values
    are attached to fake tensors, and reads are recorded in `values`.
    """
    # Real tensors that the code refers to become constants.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # No subclass: PyTorch selects the rules of some operators by the exact type of the mode.
    mode.dispatch = _StrideCorrector(mode, values, uses_onednn=uses_onednn)
    return mode


def _has_dynamic_shape(func: OpOverload, args: Sequence[Any]) -> bool:
    """Return whether values decide the shape of an operation: of an index, only those of masks."""
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    is_index = func.overloadpacket is torch.ops.aten.index
    return not is_index or any(t.dtype in (torch.bool, torch.uint8) for t in tensors_in(args[1]))


class _StrideCorrector:
    """Dispatch function of a fake mode: predicts outputs, corrects strides and attaches values."""

    def __init__(self, mode: FakeTensorMode, values: KnownValues, *, uses_onednn: bool) -> None:
        self._mode = mode
        self._values = values
        self._predict = mode.dispatch
        self._uses_onednn = uses_onednn
        self._depth = 0
        """Number of operations that are being predicted, one inside another."""
        self._layouts: dict[Any, Sequence[Any] | None] = {}
        """Result of `_measure_layouts`, by operator and arguments (`_layout_key`)."""

    def __call__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the fake outputs of an operation, or the known value that Python reads.

        Only operations that are not part of another are corrected. If Python reads an unknown
        value, PyTorch raises its own error.
        """
        keywords = kwargs or {}
        if not isinstance(func, OpOverload):
            return self._predict(func, types, args, keywords)
        _check_foreign_tensors(func, args, keywords)
        if func in ASSERTS or func is LINALG_CHECK:
            self._values.record_assert(func, args[0])
        is_read = torch.Tag.data_dependent_output in func.tags
        has_dynamic_shape = _has_dynamic_shape(func, args)
        is_inner = self._depth > 0
        known_value = None
        if is_read or has_dynamic_shape or not is_inner:
            values = self._values
            evaluate = values.evaluate_dynamic_shape if has_dynamic_shape else values.evaluate
            known_value = evaluate(func, args, keywords)
        if known_value is not None and (is_read or has_dynamic_shape):
            if is_read:
                self._values.record_read(known_value, known_value.real_value)
                return known_value.real_value
            return self._fake_outputs(known_value)
        self._depth += 1
        try:
            outputs = self._predict_outputs(func, types, args, keywords)
        finally:
            self._depth -= 1
        if self._depth:  # an operation inside another one needs no correction
            return outputs
        outputs = self.correct_strides(func, args, keywords, outputs)
        self._values.attach(outputs, known_value)
        return outputs

    def _predict_outputs(self, func: Any, types: Any, args: Any, keywords: Any) -> Any:
        """Return PyTorch's predictions; for `_UNPREDICTED_OPERATORS` fakes of a call on zeros."""
        if func.overloadpacket.__name__ in _UNPREDICTED_OPERATORS:
            leaves, spec = _pytree.tree_flatten((args, keywords))
            outputs = _execute_on_zeros(func, leaves, spec, uses_onednn=self._uses_onednn)
            if outputs is not None:
                return self._fake_outputs(KnownValue(outputs, is_metadata_only=True))
        return self._predict(func, types, args, keywords)

    def _fake_outputs(self, known_value: KnownValue) -> Any:
        """Return `known_value` with fake CPU tensors, to which known values are attached."""

        def make_fake(real_tensor: torch.Tensor) -> torch.Tensor:
            return torch.empty_strided(
                real_tensor.shape, real_tensor.stride(), dtype=real_tensor.dtype
            )

        with self._mode:
            outputs = _pytree.tree_map_only(torch.Tensor, make_fake, known_value.real_value)
        self._values.attach(outputs, known_value)
        return outputs

    def correct_strides(self, func: Any, args: Any, keywords: Any, outputs: Any) -> Any:
        """Return fake outputs with the strides of the same call on zeros.

        Unchanged are views of inputs, outputs of fewer than two dimensions, not on the CPU, not
        strided or with a constant value, and those whose shape differs on zeros.
        """
        leaves, spec = _pytree.tree_flatten(outputs)
        inputs = tensors_in((args, keywords))
        if any(tensor.layout != torch.strided for tensor in inputs):
            return outputs
        input_keys = {storage_key(tensor) for tensor in inputs}
        new_indices = [
            index
            for index, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor)
            and leaf.dim() > 1
            and leaf.device.type == "cpu"
            and leaf.layout == torch.strided
            and getattr(leaf, "constant", None) is None
            and storage_key(leaf) not in input_keys
        ]
        if not new_indices:
            return outputs
        layouts = self._real_layouts(func, args, keywords)
        if layouts is None or len(layouts) != len(leaves):
            return outputs
        for index in new_indices:
            fake, layout = leaves[index], layouts[index]
            if layout is not None and fake.shape == layout[0] and fake.stride() != layout[1]:
                with self._mode:
                    leaves[index] = torch.empty_strided(
                        *layout, dtype=fake.dtype, device=fake.device
                    )
        return _pytree.tree_unflatten(leaves, spec)

    def _real_layouts(self, func: Any, args: Any, keywords: Any) -> Sequence[Any] | None:
        """Return (shape, strides) of each flat output on zeros, cached; None if the call fails."""
        leaves, spec = _pytree.tree_flatten((args, keywords))
        key = (func, spec, tuple(map(_layout_key, leaves)))
        try:
            if key not in self._layouts:
                self._layouts[key] = _measure_layouts(
                    func, leaves, spec, uses_onednn=self._uses_onednn
                )
        except TypeError:  # an argument that cannot be hashed
            return None
        return self._layouts[key]


def _check_foreign_tensors(func: OpOverload, args: Any, keywords: Any) -> None:
    """Refuse to write, or to track by autograd, a tensor that is not fake."""
    for position, argument in enumerate(func._schema.arguments):  # noqa: SLF001 - has the writes
        value = args[position] if position < len(args) else keywords.get(argument.name)
        for tensor in tensors_in(value):
            if isinstance(tensor, FakeTensor):
                continue
            if argument.alias_info is not None and argument.alias_info.is_write:
                raise foreign_tensor_error("is changed")
            if tensor.requires_grad and torch.is_grad_enabled():
                raise foreign_tensor_error("that requires a gradient is used")


_UNPREDICTED_OPERATORS: Final = ("_grouped_mm",)
"""Operators whose prediction rejects types that the CPU kernel supports; executed on zeros."""


def _layout_key(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return (leaf.shape, leaf.stride(), leaf.dtype, leaf.device)
    return (type(leaf), leaf)


def _measure_layouts(
    func: Any, leaves: Sequence[Any], spec: Any, *, uses_onednn: bool
) -> Sequence[Any] | None:
    """Return (shape, strides) of each flat output on zeros; None for no tensor or a failure."""
    outputs = _execute_on_zeros(func, leaves, spec, uses_onednn=uses_onednn)
    if outputs is None:
        return None
    return [
        (output.shape, output.stride()) if isinstance(output, torch.Tensor) else None
        for output in _pytree.tree_leaves(outputs)
    ]


def _execute_on_zeros(func: Any, leaves: Sequence[Any], spec: Any, *, uses_onednn: bool) -> Any:
    """Execute an operation on zeros; return its outputs, None if it fails or takes a generator."""
    if any(isinstance(leaf, torch.Generator) for leaf in leaves):
        return None
    random_state = torch.random.fork_rng(devices=[])
    with no_dispatch(), torch.no_grad(), onednn_kernels(enabled=uses_onednn), random_state:
        try:
            args, keywords = _pytree.tree_unflatten([_zeros_like(leaf) for leaf in leaves], spec)
            return func(*args, **keywords)
        except FOREIGN_ERRORS:
            return None


def _zeros_like(leaf: Any) -> Any:
    """Return CPU zeros with shape, strides and dtype of a tensor; any other object unchanged."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    dimensions = zip(leaf.shape, leaf.stride(), strict=True)
    last_offset = sum((size - 1) * stride for size, stride in dimensions)
    memory = torch.zeros(last_offset + 1 if leaf.numel() else 0, dtype=leaf.dtype)
    return memory.as_strided(leaf.shape, leaf.stride())


_MISPREDICTED_OPERATORS: Final = frozenset(
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
def correct_fake_strides(inputs: Sequence[Any]) -> Iterator[None]:
    """Context manager that corrects strides of `_MISPREDICTED_OPERATORS` under AOTAutograd.

    Otherwise views could be captured that real tensors forbid. No effect without fake `inputs`.
    """
    mode = detect_fake_mode(inputs)
    if mode is None:
        yield
        return
    predict = mode.dispatch
    corrector = _StrideCorrector(mode, KnownValues(), uses_onednn=torch.backends.mkldnn.enabled)

    def dispatch(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = predict(func, types, args, kwargs)
        if isinstance(func, OpOverload) and func.overloadpacket.__name__ in _MISPREDICTED_OPERATORS:
            return corrector.correct_strides(func, args, kwargs or {}, outputs)
        return outputs

    mode.dispatch = dispatch
    try:
        yield
    finally:
        del mode.dispatch


# -- annotations, checkpoints, operators without decomposition ---------------------------------


@contextmanager
def attach_known_values(
    captured_module: torch.nn.Module, inputs: Sequence[Any], values: KnownValues
) -> Iterator[None]:
    """Context manager that attaches real inputs and buffers to the fakes, without copies."""
    buffers = {
        path: buffer.detach()
        for path, buffer in captured_module.named_buffers(remove_duplicate=False)
    }
    real_inputs = [value.detach() if isinstance(value, torch.Tensor) else None for value in inputs]

    def attach_values(_: torch.nn.Module, fake_inputs: Sequence[Any]) -> None:
        """Attach the real tensors to fake inputs and buffers (`attach_source`); a pre-hook."""
        for position, (fake, real_input) in enumerate(zip(fake_inputs, real_inputs, strict=True)):
            if real_input is not None:
                values.attach_source(fake, real_input, SourceTensor(position))
        for path, fake in captured_module.named_buffers(remove_duplicate=False):
            if path in buffers:  # a module that an earlier pass created may have further buffers
                values.attach_source(fake, buffers[path], SourceTensor(None, path))

    handle = captured_module.register_forward_pre_hook(attach_values)
    try:
        yield
    finally:
        handle.remove()


_NATIVE_PREFIXES: Final = ("upsample_", "_upsample_")
_NATIVE_OPERATORS: Final = (
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
"""Operators, and prefixes of operators, that PyTorch would decompose during a capture, with
other rounding or strides than in eager mode."""


@contextmanager
def native_operators() -> Iterator[None]:
    """Context manager that prevents decompositions whose results differ from eager mode.

    Some Python kernels replace an operator: ``upsample_nearest2d`` becomes an index, whose gradient
    has other strides and sums in another order. Such kernels are removed, that of dropout is
    wrapped; those that a capture needs (batch norm) or with identical results remain.
    """
    old_kernels: list[tuple[Any, Any, Any]] = []
    for operator in _native_overloads():
        for key in (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd):
            if key in operator.py_kernels:
                old_kernels.append((operator, key, operator.py_kernels.pop(key)))
        operator._dispatch_cache.clear()  # noqa: SLF001 - no other way
    dropout = torch.ops.aten.dropout.default
    for key in (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd):
        if key in dropout.py_kernels:
            kernel = dropout.py_kernels[key]
            old_kernels.append((dropout, key, kernel))
            dropout.py_kernels[key] = partial(_dropout, kernel)
    dropout._dispatch_cache.clear()  # noqa: SLF001 - as above
    try:
        yield
    finally:
        for operator, key, kernel in old_kernels:
            operator.py_kernels[key] = kernel
            operator._dispatch_cache.clear()  # noqa: SLF001 - as above


def _dropout(
    kernel: Callable[..., torch.Tensor],
    x: torch.Tensor,
    p: float,
    train: bool,  # noqa: FBT001 - as the operator
) -> torch.Tensor:
    """Call a dropout kernel; return `x` itself, like eager mode, without training or with p 0."""
    return kernel(x, p, train) if train and p != 0 else x


def _native_overloads() -> Iterator[Any]:
    """Yield the overloads of operators that must not be decomposed."""
    for name in dir(torch.ops.aten):
        if name in _NATIVE_OPERATORS or name.startswith(_NATIVE_PREFIXES):
            packet = getattr(torch.ops.aten, name)
            for overload in packet.overloads():
                yield getattr(packet, overload)


@contextmanager
def refuse_seeding() -> Iterator[None]:
    """Context manager in which ``torch.manual_seed`` and ``torch.seed`` raise `ForbiddenError`.

    Only PyTorch's default CPU generator is protected; at the end its state is restored.
    """
    generator = torch.default_generator
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed and torch.seed call the generator. The functions themselves must not be
        # replaced, because PyTorch may build tables of its functions during the capture.
        torch.default_generator = torch.random.default_generator = _Unseedable(generator)
        try:
            yield
        finally:
            torch.default_generator = torch.random.default_generator = generator


class _Unseedable:
    """Wraps a random generator; raises `ForbiddenError` if it is seeded."""

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
