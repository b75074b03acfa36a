"""``quantized``: a float front and some batches, or what PT2E made of it, become an int8 front."""

from __future__ import annotations

import copy
import math
import re
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from poetmodel.errors import InputError, listed, shown
from poetmodel.torch.errors import explained, quiet, require_package
from poetmodel.torch.graph.operators import module_path
from poetmodel.torch.int8.front import QuantizedFront
from poetmodel.torch.int8.reader import Training
from poetmodel.torch.int8.reading import check_operators, front_of, is_converted
from poetmodel.torch.int8.training import ROUNDINGS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import fx

aten: Final = torch.ops.aten
_WEIGHTED: Final = (aten.conv2d.default, aten.conv2d.padding, aten.linear.default)
"""Operators with a weight."""
HEADROOM: Final = 1.5
"""Factor of the ranges that training moves."""
_LAST: Final = re.compile(r"last-(\d+)")
_ACTIVATIONS: Final = (
    aten.relu.default,
    aten.relu_.default,
    aten.relu6.default,
    aten.hardtanh.default,
    aten.hardtanh_.default,
    aten.clamp.default,
)
"""What may follow such an operator, or a sum, in one kernel."""
_SUMS: Final = (aten.add.Tensor, aten.add_.Tensor)
_MEANS: Final = (aten.avg_pool2d.default, aten.adaptive_avg_pool2d.default, aten.mean.dim)
_MOVED: Final = (
    aten.max_pool2d.default,
    aten.flatten.using_ints,
    aten.view.default,
    aten.reshape.default,
    aten.dropout.default,
    aten.pad.default,
)
"""Operators whose results are some of the numbers that they are given."""


def quantized(
    front: nn.Module,
    batches: Iterable[Any] | None = None,
    *,
    train: str | Sequence[str] | None = None,
    rounding: str = ROUNDINGS[0],
    headroom: float = HEADROOM,
) -> QuantizedFront:
    """Return a part of a model, or all of it, in int8: frozen, or with layers that train.

    Weights are quantized symmetrically for each output channel, activations for each tensor by
    what they are on some batches. A batch norm behind a convolution becomes a part of it.

    Parameters
    ----------
    front : torch.nn.Module
        From the input of the model on: convolutions and linear layers with ReLU or ReLU6, sums,
        pools and means. Or a module that PT2E has converted, whatever its quantizer was. It stays
        as it is.
    batches : iterable of Tensor or tuple, optional
        Some batches of what `front` is given; of a tuple, such as a data loader yields, its first
        element. They are what the front sees: in float32, converted and normalized. Not for a
        converted module.
    train : str or sequence of str, optional
        Convolutions and linear layers whose int8 weights train: ``all``, ``last-N``, or names or
        patterns of modules such as ``blocks.3.*``. By default none does.
    rounding : str, optional
        How changes below a step of a byte are kept: ``16 bits``, with another int8 for each weight,
        or ``stochastic``, without.
    headroom : float, optional
        Factor from 1 by which the ranges of trained weights, and of activations behind the first
        trained layer, exceed what `front` and `batches` show: training moves them.

    Returns
    -------
    QuantizedFront
        A module without parameters, for the beginning of a model: ``nn.Sequential(front, head)``.
        With `train` a `QuantizedNetwork`, whose parameters `QuantizedSGD` trains.

    Raises
    ------
    MissingExtraError
        If the package torchao is not installed, and `front` is not converted.
    CaptureError
        If `front` cannot be exported by ``torch.export``.
    InputError
        If an operator has no kernel in int8: says which, and its module. If there is no batch, or
        one that is not like the first. If `train` matches no layer.

    Notes
    -----
    The result is exact against its own definition, the same on each device, and near what the
    float front returns: hold its accuracy against that of the float model before you use it.
    """
    check_training(rounding, headroom)
    finished = partial(network_of, train=train, rounding=rounding, headroom=headroom)
    if is_converted(front):
        if batches is not None:
            raise InputError("batches: the module is quantized already; leave them out")
        return finished(front)
    if isinstance(front, QuantizedFront):
        raise InputError("front: it is quantized already")
    if any("activation_post_process" in name for name, _ in front.named_modules()):
        raise InputError("front: it is prepared, but not converted; call convert_pt2e first")
    given = _checked(batches)
    first = next(given, None)
    if first is None:
        raise InputError("batches: expected at least one, by which activations are quantized")
    require_package("torchao", "quantizing a front", extra="quantize")
    own = copy.deepcopy(front).eval()
    with quiet(), explained(type(front).__name__), torch.no_grad():
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

        # Two samples: what is one in an example counts as one forever.
        example = torch.cat((first[:1], first[:1]))
        sizes = ({0: torch.export.Dim.AUTO},)
        exported = torch.export.export(own, (example,), dynamic_shapes=sizes)
        prepared = prepare_pt2e(exported.module(), _quantizer())
        # Before batches are run, which may take long.
        check_prepared(prepared, train=train)
        prepared(first)
        for batch in given:
            prepared(batch)
        return finished(convert_pt2e(prepared))


def network_of(
    converted: Any,
    *,
    train: str | Sequence[str] | None,
    rounding: str,
    headroom: float,
    where: str = "",
) -> QuantizedFront:
    """Return the front that a converted module is, or a network if `train` names layers of it.

    `where` is its place, for errors.
    """
    if train is None:
        return front_of(converted, where=where or "quantized front")
    nodes = _trained_nodes(converted, train, f"{where}: train" if where else "train")
    training = Training(nodes, rounding=rounding, headroom=float(headroom))
    return front_of(converted, where=where or "quantized network", training=training)


def check_prepared(prepared: Any, *, train: str | Sequence[str] | None) -> None:
    """Raise `InputError` for layers that are not there, and for operators without a kernel."""
    where, nodes = "quantized front", frozenset[Any]()
    if train is not None:
        where, nodes = "quantized network", _trained_nodes(prepared, train, "train")
    check_operators(prepared, where=where, training=Training(nodes))


def check_training(rounding: str, headroom: float) -> None:
    """Raise `InputError` for an unknown rounding, or a factor below 1."""
    if rounding not in ROUNDINGS:
        raise InputError(f"rounding: expected one of {', '.join(ROUNDINGS)}, got {shown(rounding)}")
    if not (math.isfinite(headroom) and headroom >= 1):
        raise InputError(f"headroom: expected a number from 1, got {headroom}")


def _trained_nodes(converted: Any, train: str | Sequence[str], option: str) -> frozenset[fx.Node]:
    """Return the layers with weights that `train` names; `InputError` if it matches none.

    `option` is what errors call it.
    """
    weighted = [
        node
        for node in converted.graph.nodes
        if node.target in (*_WEIGHTED, aten.convolution.default)
    ]
    paths = [module_path(node) for node in weighted]
    if train == "all":
        return frozenset(weighted)
    if isinstance(train, str) and (last := _LAST.fullmatch(train)):
        count = int(last[1])
        if not 0 < count <= len(weighted):
            raise InputError(f"{option}: expected last-1 to last-{len(weighted)}, got {train}")
        return frozenset(weighted[-count:])
    patterns = [train] if isinstance(train, str) else list(train)
    matched = {
        pattern: [
            node for node, path in zip(weighted, paths, strict=True) if fnmatchcase(path, pattern)
        ]
        for pattern in patterns
    }
    missing = [pattern for pattern, nodes in matched.items() if not nodes]
    if missing or not patterns:
        what = ", ".join(map(repr, missing)) or "no name"
        raise InputError(
            f"{option}: expected all, last-N, or names or patterns of layers, got {what}; the "
            f"layers are {listed(paths)}"
        )
    return frozenset(node for nodes in matched.values() for node in nodes)


def _first(batch: Any) -> torch.Tensor:
    """Return what the front is given of a batch."""
    if isinstance(batch, tuple | list) and batch:
        batch = batch[0]
    if not isinstance(batch, torch.Tensor) or not batch.is_floating_point():
        got = f"one of {batch.dtype}" if isinstance(batch, torch.Tensor) else shown(batch)
        raise InputError(
            f"batches: expected tensors of float32, what the front is given, got {got}; convert "
            "and normalize outside of the front"
        )
    return batch


def _checked(batches: Iterable[Any] | None) -> Iterator[torch.Tensor]:
    """Yield what the front is given of each batch; raise `InputError` for what is none."""
    if isinstance(batches, torch.Tensor):
        raise InputError("batches: expected several batches, got one tensor; give [tensor]")
    sizes: torch.Size | None = None
    for number, batch in enumerate(batches or ()):
        x = _first(batch)
        sizes = x.shape[1:] if sizes is None else sizes
        if x.shape[1:] != sizes:
            got, first = ("x".join(map(str, each)) for each in (x.shape[1:], sizes))
            raise InputError(f"batches: batch {number} has samples of {got}, the first of {first}")
        if not bool(x.isfinite().all()):
            raise InputError(f"batches: batch {number} has values that are not finite")
        yield x


def _quantizer() -> Any:
    """Return the quantizer of fronts: what it says of a graph, PT2E does."""
    from torchao.quantization.pt2e import HistogramObserver, PerChannelMinMaxObserver
    from torchao.quantization.pt2e.quantizer import (
        QuantizationAnnotation,
        QuantizationSpec,
        Quantizer,
        SharedQuantizationSpec,
    )

    values = QuantizationSpec(
        dtype=torch.int8,
        observer_or_fake_quant_ctr=HistogramObserver.with_args(),
        quant_min=-128,
        quant_max=127,
        qscheme=torch.per_tensor_affine,
    )
    weights = QuantizationSpec(
        dtype=torch.int8,
        observer_or_fake_quant_ctr=PerChannelMinMaxObserver.with_args(),
        quant_min=-127,
        quant_max=127,
        qscheme=torch.per_channel_symmetric,
        ch_axis=0,
    )

    def annotate(node: fx.Node, inputs: dict[Any, Any], output: Any) -> None:
        node.meta["quantization_annotation"] = QuantizationAnnotation(
            input_qspec_map=inputs, output_qspec=output, _annotated=True
        )

    class FrontQuantizer(Quantizer):  # type: ignore[misc, unused-ignore]
        def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
            for node in model.graph.nodes:
                _annotate(node, values, weights, annotate, SharedQuantizationSpec)
            return model

        def validate(self, model: fx.GraphModule) -> None:
            """Take any model: what is not quantized is refused when the front is read."""

    return FrontQuantizer()


def _annotate(
    node: fx.Node,
    values: Any,
    weights: Any,
    annotate: Callable[[fx.Node, dict[Any, Any], Any], None],
    shared: Callable[[Any], Any],
) -> None:
    """Say how the operands and the result of an operation are quantized."""
    operands = node.all_input_nodes
    result = None if _goes_on(node) else values
    if node.target in _WEIGHTED:
        x, weight = node.args[:2]
        annotate(node, {x: values, weight: weights}, result)
    elif node.target in _SUMS:
        annotate(node, dict.fromkeys(operands, values), result)
    elif node.target in _MEANS:
        annotate(node, {operands[0]: values}, values)
    elif node.target in _ACTIVATIONS:
        # Behind an operator it is part of that, whose result it quantizes.
        alone = not _goes_on(operands[0])
        annotate(node, {operands[0]: values} if alone else {}, values)
    elif node.target in _MOVED:
        annotate(node, {operands[0]: values}, shared((operands[0], node)))


def _goes_on(node: fx.Node) -> bool:
    """Whether an activation, and nothing else, reads what an operator makes."""
    of_kernel = node.target in (*_WEIGHTED, *_SUMS)
    return of_kernel and len(node.users) == 1 and next(iter(node.users)).target in _ACTIVATIONS
