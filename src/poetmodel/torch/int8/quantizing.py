"""``quantized``: quantize a float front with example batches, or convert a PT2E module, to int8."""

from __future__ import annotations

import copy
import inspect
import math
import re
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from poetmodel.errors import InputError, join_names, quote
from poetmodel.torch.errors import convert_exceptions, require_package, suppress_warnings
from poetmodel.torch.graph.operators import module_path
from poetmodel.torch.int8.front import QuantizedFront
from poetmodel.torch.int8.reader import Reader, Training
from poetmodel.torch.int8.reading import is_converted
from poetmodel.torch.int8.registry import PATTERNS
from poetmodel.torch.int8.training import ROUNDINGS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import fx

aten: Final = torch.ops.aten
_WEIGHT_OPERATORS: Final = (
    aten.conv2d.default,
    aten.conv2d.padding,
    aten.convolution.default,
    aten.linear.default,
)
"""Operators with a weight that the quantizer annotates."""
HEADROOM: Final = 1.5
"""Default factor for ranges that change during training."""
_LAST_PATTERN: Final = re.compile(r"last-(\d+)")
"""Matches the selection of the last layers."""
_ACTIVATIONS: Final = (
    aten.relu.default,
    aten.relu_.default,
    aten.relu6.default,
    aten.hardtanh.default,
    aten.hardtanh_.default,
    aten.clamp.default,
    aten.clamp_.default,
    aten.clamp_min.default,
)
"""Activations that can be fused into the kernel of an operator with a weight, or of a sum."""
_SUMS: Final = (aten.add.Tensor, aten.add_.Tensor)
_LEVEL_PRESERVING: Final = (
    aten.max_pool2d.default,
    aten.flatten.using_ints,
    aten.view.default,
    aten.reshape.default,
    aten.dropout.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.detach.default,
    aten.alias.default,
    aten.constant_pad_nd.default,
    aten.pad.default,
)
"""Operators whose results are elements of their input, or padding, in the same quantization."""


def quantized(
    front: nn.Module,
    batches: Iterable[Any] | None = None,
    *,
    train: str | Sequence[str] | None = None,
    rounding: str = ROUNDINGS[0],
    headroom: float = HEADROOM,
) -> QuantizedFront:
    """Convert a model or its first part to int8: frozen, or with layers that train.

    The weights of a float `front` are quantized symmetrically per output channel, its activations
    per tensor by their values on example batches, in evaluation mode. A batch norm directly after a
    convolution is folded into it. The quantization of a converted module is unchanged, except for
    `headroom` if layers train.

    Parameters
    ----------
    front : torch.nn.Module
        The first part of a model, from its input: convolutions and linear layers with ReLU or
        ReLU6, sums, pools and means. Or a module that torchao's PT2E converted (``convert_pt2e``),
        with any quantizer. `front` is not changed.
    batches : iterable of Tensor, tuple or list, optional
        Example batches of the input of `front`, in float32, preprocessed and normalized. Of a tuple
        or list, for example from a data loader, the first element is used. Not for a converted
        module.
    train : str or sequence of str, optional
        Convolutions and linear layers whose int8 weights and biases train: ``all``; ``last-N``, the
        last N in the order of the graph; or whole names, or patterns, of their modules, such as
        ``blocks.3.*``. Default: none.
    rounding : str, optional
        Treatment of weight changes below one int8 step, used only with `train`: ``16 bits`` stores
        another int8 for each weight; ``stochastic`` rounds randomly.
    headroom : float, optional
        Factor, at least 1, that widens the ranges of trained weights, and of activations that
        depend on them, because training changes these ranges. Used only with `train`.

    Returns
    -------
    QuantizedFront
        A module without parameters, for the beginning of a model: ``nn.Sequential(front, head)``.
        With `train`, a `QuantizedNetwork`, whose parameters `QuantizedSGD` trains.

    Raises
    ------
    MissingExtraError
        If the package torchao is missing, and `front` is not converted.
    CaptureError
        If ``torch.export`` or torchao cannot convert `front`, or if `front` fails on a batch.
    InputError
        If an operator or its quantization has no int8 kernel; the message names the operator and
        its module. If `front` does not have one input and one result. If `batches` is one tensor.
        If there is no batch, or one that is no float tensor, is not finite, or has samples of
        another shape than the first. If `front` is converted and `batches` is not None. If `front`
        is already a `QuantizedFront`, or prepared by PT2E but not converted. If `rounding` or
        `headroom` is invalid, or `train` or an entry of it selects no layer.

    Notes
    -----
    The result follows the definition of int8 operators exactly on each device, and approximates the
    float front: compare the accuracy with that of the float model before use.
    """
    check_training(rounding, headroom)
    convert = partial(convert_network, train=train, rounding=rounding, headroom=headroom)
    if is_converted(front):
        if batches is not None:
            raise InputError("batches: the module is already quantized; leave them out")
        return convert(front)
    if isinstance(front, QuantizedFront):
        raise InputError("front: is already quantized")
    if any("activation_post_process" in name for name, _ in front.named_modules()):
        raise InputError("front: is prepared, but not converted; call convert_pt2e first")
    _check_required_inputs(front)
    inputs = _read_inputs(batches)
    first_input = next(inputs, None)
    if first_input is None:
        raise InputError("batches: expected at least one, to quantize activations")
    require_package("torchao", "quantizing a front", extra="quantize")
    front_copy = copy.deepcopy(front).eval()
    with suppress_warnings(), convert_exceptions(type(front).__name__), torch.no_grad():
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

        # Two samples, because torch.export treats a size of 1 as constant.
        example_input = torch.cat((first_input[:1], first_input[:1]))
        dynamic_shapes = ({0: torch.export.Dim.AUTO},)
        exported_program = torch.export.export(
            front_copy, (example_input,), dynamic_shapes=dynamic_shapes
        )
        prepared_module = prepare_pt2e(exported_program.module(), _make_quantizer())
        # Check before the batches are executed, which may take long.
        check_prepared(prepared_module, train=train)
        prepared_module(first_input)
        for x in inputs:
            prepared_module(x)
        return convert(convert_pt2e(prepared_module))


def convert_network(
    converted_module: Any,
    *,
    train: str | Sequence[str] | None,
    rounding: str,
    headroom: float,
    label: str = "",
) -> QuantizedFront:
    """Convert a PT2E module to a `QuantizedFront`; with `train`, to a `QuantizedNetwork`.

    `label` is the name of the module in messages. The caller checks `rounding` and `headroom`.
    """
    if train is None:
        return Reader(converted_module, label or "quantized front", Training()).convert()
    nodes = _select_trained_nodes(converted_module, train, f"{label}: train" if label else "train")
    training = Training(nodes, rounding=rounding, headroom=float(headroom))
    return Reader(converted_module, label or "quantized network", training).convert()


def check_prepared(prepared_module: Any, *, train: str | Sequence[str] | None) -> None:
    """Raise `InputError` for operators without a kernel, and for a wrong selection `train`."""
    label, nodes = "quantized front", frozenset[Any]()
    if train is not None:
        label, nodes = "quantized network", _select_trained_nodes(prepared_module, train, "train")
    Reader(prepared_module, label, Training(nodes)).check_operators()


def check_training(rounding: str, headroom: float) -> None:
    """Raise `InputError` for an unknown rounding, or a headroom below 1 or not finite."""
    if rounding not in ROUNDINGS:
        raise InputError(f"rounding: expected one of {', '.join(ROUNDINGS)}, got {quote(rounding)}")
    if not (math.isfinite(headroom) and headroom >= 1):
        raise InputError(f"headroom: expected a number from 1, got {headroom}")


def _check_required_inputs(front: nn.Module) -> None:
    """Raise `InputError` if `front` requires more than one input."""
    try:
        parameters = inspect.signature(front.forward).parameters.values()
    except ValueError:
        return
    variadic_kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required_names = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.kind not in variadic_kinds
    ]
    if len(required_names) > 1:
        raise InputError(
            f"front: expected one input and one result, got the inputs {join_names(required_names)}"
            "; quantize a part of the model with one of each"
        )


def _select_trained_nodes(
    converted_module: Any, train: str | Sequence[str], option: str
) -> frozenset[fx.Node]:
    """Return the nodes of convolutions and linear layers that `train` selects.

    A name or pattern matches a whole module path; in a sequence, ``all`` and ``last-N`` are
    ordinary patterns. `option` is the name of `train` in messages.
    """
    weight_nodes = [
        node for node in converted_module.graph.nodes if node.target in _WEIGHT_OPERATORS
    ]
    paths = [module_path(node) for node in weight_nodes]
    if not weight_nodes:
        raise InputError(f"{option}: the front has no layer with weights to train")
    if train == "all":
        return frozenset(weight_nodes)
    if isinstance(train, str) and (last_match := _LAST_PATTERN.fullmatch(train)):
        layer_count = int(last_match[1])
        if not 0 < layer_count <= len(weight_nodes):
            raise InputError(f"{option}: expected last-1 to last-{len(weight_nodes)}, got {train}")
        return frozenset(weight_nodes[-layer_count:])
    patterns = [train] if isinstance(train, str) else list(train)
    nodes_by_pattern = {
        pattern: [
            node
            for node, path in zip(weight_nodes, paths, strict=True)
            if fnmatchcase(path, pattern)
        ]
        for pattern in patterns
    }
    unmatched_patterns = [pattern for pattern, nodes in nodes_by_pattern.items() if not nodes]
    if unmatched_patterns or not patterns:
        unmatched_text = ", ".join(map(repr, unmatched_patterns)) or "no name"
        raise InputError(
            f"{option}: expected all, last-N, or names or patterns of layers, got "
            f"{unmatched_text}; the layers are {join_names(paths)}"
        )
    return frozenset(node for nodes in nodes_by_pattern.values() for node in nodes)


def _read_front_input(batch: Any) -> torch.Tensor:
    """Return a floating-point batch, or the first element of a tuple or list."""
    if isinstance(batch, tuple | list) and batch:
        batch = batch[0]
    if not isinstance(batch, torch.Tensor) or not batch.is_floating_point():
        batch_text = f"one of {batch.dtype}" if isinstance(batch, torch.Tensor) else quote(batch)
        raise InputError(
            "batches: expected tensors of float32, the input of the front, got "
            f"{batch_text}; convert and normalize outside of the front"
        )
    return batch


def _read_inputs(batches: Iterable[Any] | None) -> Iterator[torch.Tensor]:
    """Yield the input of the front from each batch: finite, of one sample shape."""
    if isinstance(batches, torch.Tensor):
        raise InputError("batches: expected several batches, got one tensor; pass [tensor]")
    sample_shape: torch.Size | None = None
    for number, batch in enumerate(batches or ()):
        x = _read_front_input(batch)
        sample_shape = x.shape[1:] if sample_shape is None else sample_shape
        if x.shape[1:] != sample_shape:
            shape_text, first_shape_text = (
                "x".join(map(str, shape)) for shape in (x.shape[1:], sample_shape)
            )
            raise InputError(
                f"batches: batch {number} has samples of {shape_text}, the first of "
                f"{first_shape_text}"
            )
        if not bool(x.isfinite().all()):
            raise InputError(f"batches: batch {number} has values that are not finite")
        yield x


def _make_quantizer() -> Any:
    """Return a quantizer for PT2E that annotates nodes as `_annotate` does."""
    from torchao.quantization.pt2e import HistogramObserver, PerChannelMinMaxObserver
    from torchao.quantization.pt2e.quantizer import (
        QuantizationAnnotation,
        QuantizationSpec,
        Quantizer,
        SharedQuantizationSpec,
    )

    activation_spec = QuantizationSpec(
        dtype=torch.int8,
        observer_or_fake_quant_ctr=HistogramObserver.with_args(),
        quant_min=-128,
        quant_max=127,
        qscheme=torch.per_tensor_affine,
    )
    weight_spec = QuantizationSpec(
        dtype=torch.int8,
        observer_or_fake_quant_ctr=PerChannelMinMaxObserver.with_args(),
        quant_min=-127,
        quant_max=127,
        qscheme=torch.per_channel_symmetric,
        ch_axis=0,
    )

    def annotate(node: fx.Node, input_specs: dict[Any, Any], output_spec: Any) -> None:
        node.meta["quantization_annotation"] = QuantizationAnnotation(
            input_qspec_map=input_specs, output_qspec=output_spec, _annotated=True
        )

    class FrontQuantizer(Quantizer):  # type: ignore[misc, unused-ignore]
        def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
            for node in model.graph.nodes:
                _annotate(node, activation_spec, weight_spec, annotate, SharedQuantizationSpec)
            return model

        def validate(self, model: fx.GraphModule) -> None:
            """Accept any model: operators that are not quantized are refused during conversion."""

    return FrontQuantizer()


def _annotate(
    node: fx.Node,
    activation_spec: Any,
    weight_spec: Any,
    annotate: Callable[[fx.Node, dict[Any, Any], Any], None],
    share_spec: Callable[[Any], Any],
) -> None:
    """Call `annotate` with how to quantize the operands and result of an operation, if at all."""
    operands = node.all_input_nodes
    output_spec = None if _is_fused(node) else activation_spec
    if node.target in _WEIGHT_OPERATORS:
        x, weight = node.args[:2]
        annotate(node, {x: activation_spec, weight: weight_spec}, output_spec)
    elif node.target in _ACTIVATIONS:
        # The operand of a fused activation stays float: only the result is quantized.
        reads_bytes = not _is_fused(operands[0])
        annotate(node, {operands[0]: activation_spec} if reads_bytes else {}, activation_spec)
    elif node.target in _LEVEL_PRESERVING:
        annotate(node, {operands[0]: activation_spec}, share_spec((operands[0], node)))
    elif node.target in PATTERNS:
        annotate(node, dict.fromkeys(operands, activation_spec), output_spec)


def _is_fused(node: fx.Node) -> bool:
    """Return whether an operator's only reader is an activation that is fused into the operator."""
    can_fuse = node.target in (*_WEIGHT_OPERATORS, *_SUMS)
    return can_fuse and len(node.users) == 1 and next(iter(node.users)).target in _ACTIVATIONS
