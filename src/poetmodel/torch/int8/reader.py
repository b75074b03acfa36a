"""Conversion of PT2E modules: operators between dequantize and quantize become one layer.

PT2E writes ``dequantize -> operator -> activation -> quantize`` in place of an operator and its
activation. Patterns convert the operators after a dequantize node; most become a layer only at the
quantize node, whose levels they need.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Final, NoReturn

import torch
from torch import fx

from poetmodel.errors import InputError
from poetmodel.torch.graph.operators import arguments_with_defaults, module_path, operator_name
from poetmodel.torch.int8.front import QuantizedFront, QuantizedLayer, Wire
from poetmodel.torch.int8.levels import Levels, to_float32
from poetmodel.torch.int8.registry import PATTERNS
from poetmodel.torch.int8.training import ROUNDINGS, QuantizedNetwork, TrainedLayer
from poetmodel.torch.int8.values import (
    INPUT,
    PaddedValue,
    PendingLayer,
    QuantizedValue,
)

NAMESPACE: Final = "quantized_decomposed"
"""Namespace of PT2E's operators that quantize and dequantize."""
_INT8_SHIFTS: Final = {torch.int8: 0, torch.uint8: 128}
"""Types of activations, and the number to subtract from their bytes and zero points to get int8."""
_INT8_LIMITS: Final = (-128, 127)
"""The limits of int8."""
_MAX_INT32: Final = 2**31 - 1
_MAX_PRODUCTS: Final = 65_535
"""Maximum number of products in one sum of a kernel."""
_MAX_CENTRED_BYTE: Final = 256
"""Upper bound on the absolute value of a byte minus its zero point, by which weights are
multiplied."""


@dataclass(frozen=True, slots=True)
class Training:
    """The layers of a PT2E module that train, and the options of their training."""

    nodes: frozenset[fx.Node] = frozenset()
    """Nodes of the convolutions and linear layers that train; empty for a frozen front."""
    rounding: str = ROUNDINGS[0]
    """One of `ROUNDINGS`."""
    headroom: float = 1.0
    """Factor for the scales of trained weights, and of activations that depend on them."""

    def find_changing_nodes(self) -> frozenset[fx.Node]:
        """Return the nodes that train, and all nodes that depend on them."""
        changing_nodes = set(self.nodes)
        for node in next(iter(changing_nodes)).graph.nodes if changing_nodes else ():
            if changing_nodes & set(node.all_input_nodes):
                changing_nodes.add(node)
        return frozenset(changing_nodes)


def is_quantizing(node: fx.Node) -> bool:
    """Return whether a node is one of PT2E's operators: quantize, dequantize, or choose a scale."""
    return node.op == "call_function" and getattr(node.target, "namespace", "") == NAMESPACE


@dataclass(slots=True)
class Reader:
    """Converts a PT2E module to a front, or a network if layers train; refuses by `InputError`."""

    module: Any
    label: str
    """Name of the module in messages."""
    training: Training
    values: dict[fx.Node, Any] = field(default_factory=dict)
    """Results of `_convert_node`, by node."""
    layers: dict[str, QuantizedLayer] = field(default_factory=dict)
    """The layers added so far, by their unique names."""
    wires: list[Wire] = field(default_factory=list)
    """Connections of each layer, in the order of the layers."""
    layer_counts: Counter[str] = field(default_factory=Counter)
    """Number of layers added so far for each name without a suffix."""
    has_flat_result: bool = False
    """Whether each sample of the result is flattened."""
    changing_nodes: frozenset[fx.Node] = field(init=False)
    """Nodes whose values change in training; their scales have headroom."""

    def __post_init__(self) -> None:
        self.changing_nodes = self.training.find_changing_nodes()

    def convert(self) -> QuantizedFront:
        """Convert the module, with one input and one result, to a front or network; call once."""
        graph = self.module.graph
        result = graph.output_node().args[0]
        results = list(result) if isinstance(result, tuple | list) else [result]
        placeholders = graph.find_nodes(op="placeholder")
        if len(results) != 1 or len(placeholders) != 1:
            self._raise_error(
                f"expected one input and one result, got {len(placeholders)} and {len(results)}; "
                "quantize a part of the model with one of each"
            )
        ancestors = _ancestor_nodes(results[0])
        for node in graph.nodes:
            if node in ancestors:
                self.values[node] = self._convert_node(node)
        self._add_dequantize(results[0])
        front_class = QuantizedNetwork if self.training.nodes else QuantizedFront
        return front_class(self.layers, self.wires, has_flat_result=self.has_flat_result)

    def check_operators(self) -> None:
        """Raise `InputError` for the first operator that has no pattern and is not PT2E's.

        The module may be prepared but not converted. Only operators between input and result count.
        """
        graph = self.module.graph
        ancestors = _ancestor_nodes(graph.output_node().args[0])
        varying_nodes = set(graph.find_nodes(op="placeholder"))
        for node in graph.nodes:
            if not varying_nodes.intersection(node.all_input_nodes):
                continue
            varying_nodes.add(node)
            has_pattern = is_quantizing(node) or node.target in PATTERNS
            is_size = isinstance(node.meta.get("val"), int | torch.SymInt)
            if node.op == "call_function" and node in ancestors and not has_pattern and not is_size:
                self.refuse(node, self._no_kernel_message(node))

    def _add_dequantize(self, node: fx.Node) -> None:
        """Add the last layer, which dequantizes the result of the module; set `has_flat_result`."""
        value = self.values[node]
        is_dequantized = isinstance(value, QuantizedValue) and not (
            is_quantizing(node) and operator_name(node).startswith("quantize")
        )
        if not is_dequantized:
            self.refuse(
                node,
                "it computes the result, which is no dequantized tensor; quantize and dequantize "
                "the output",
            )
        numbers = (to_float32(value.levels.scale), value.levels.zero)
        self._add_layer(
            "dequantize", QuantizedLayer("dequantize", {}, numbers), (value.layer_number,)
        )
        self.has_flat_result = bool(value.flattened_shape)

    def _convert_node(self, node: fx.Node) -> Any:
        """Convert a node to `INPUT`, a tensor, a value of ``values.py``, or None for a size."""
        if node.op == "placeholder":
            return INPUT
        if node.op == "get_attr":
            return attrgetter(str(node.target))(self.module).detach()
        if node.op != "call_function":
            self.refuse(node, "it is no operator with an int8 kernel")
        if all(isinstance(self.values[source], torch.Tensor) for source in node.all_input_nodes):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.values.__getitem__)
            with torch.no_grad():
                return node.target(*args, **kwargs)
        if isinstance(node.meta.get("val"), int | torch.SymInt):
            return None  # a size, such as the batch size
        if is_quantizing(node):
            return self._convert_quantization(node)
        convert = PATTERNS.get(node.target)
        if convert is None:
            self.refuse(node, self._no_kernel_message(node))
        return convert(self, node)

    def _no_kernel_message(self, node: fx.Node) -> str:
        """Return the reason to refuse a node without an int8 kernel, with advice."""
        if "batch_norm" in operator_name(node):
            return (
                "it is not directly after a convolution, into which it could be folded; move it "
                "there, or leave it out"
            )
        missing_kernels, scope = ("no kernel", "front")
        if self.training.nodes:
            missing_kernels, scope = ("neither a forward nor a backward kernel", "network")
        return (
            f"it has {missing_kernels} in int8; end the {scope} before it, or replace it "
            "(supported are convolutions, linear layers, sums, pools, means, ReLU and ReLU6)"
        )

    def _convert_quantization(self, node: fx.Node) -> Any:
        """Return a quantized value, padded like the operand; quantize nodes add pending layers."""
        name = operator_name(node)
        if name not in ("quantize_per_tensor", "dequantize_per_tensor"):
            tensors = "weights and activations" if "choose" in name else "activations"
            self.refuse(node, f"expected {tensors} with one constant scale")
        value, levels = self.values[node.args[0]], self._read_levels(node)
        padded_value = value if isinstance(value, PaddedValue) else None
        value = value if padded_value is None else padded_value.value
        if name.startswith("dequantize"):
            if not isinstance(value, QuantizedValue):
                self.refuse(node, "expected a quantized value")
            dequantized_value = replace(value, levels=levels)
            return (
                dequantized_value
                if padded_value is None
                else replace(padded_value, value=dequantized_value)
            )
        if isinstance(value, str):
            layer = QuantizedLayer("quantize", {}, (levels.inverse, levels.zero))
            quantized_value = QuantizedValue(
                layer_number=self._add_layer("quantize", layer, (0,)), levels=levels
            )
            if (levels.low, levels.high) != _INT8_LIMITS:
                clamp_layer = _rescaling_layer(levels, levels)
                quantized_value = self.add_layer_with_input_levels(
                    node, clamp_layer, quantized_value
                )
        else:
            if isinstance(value, QuantizedValue):
                value = self._make_rescaling(node.args[0], value)
            if not isinstance(value, PendingLayer):
                self.refuse(node, "its input has no int8 kernel")
            quantized_value = self._add_pending(value, levels)
        if padded_value is not None:
            return replace(padded_value, value=quantized_value)
        self.wires[quantized_value.layer_number - 1] = replace(
            self.wires[quantized_value.layer_number - 1], node=node.name
        )
        return quantized_value

    def _add_pending(self, pending_layer: PendingLayer, levels: Levels) -> QuantizedValue:
        """Add a layer, if one is needed, for `levels` narrowed to its clamp; return the result."""
        clamped_levels = levels.narrow_limits(pending_layer.clamp)
        layer = pending_layer.make_layer(clamped_levels)
        if layer is None:
            (source,) = pending_layer.inputs
            return replace(
                source, levels=clamped_levels, flattened_shape=pending_layer.flattened_shape
            )
        if pending_layer.node in self.training.nodes:
            training = self.training
            layer = TrainedLayer(layer, rounding=training.rounding, headroom=training.headroom)
        layer_number = self._add_layer(
            _layer_name(pending_layer.node),
            layer,
            tuple(source.layer_number for source in pending_layer.inputs),
        )
        return QuantizedValue(
            layer_number=layer_number,
            levels=clamped_levels,
            flattened_shape=pending_layer.flattened_shape,
        )

    def _add_layer(self, name: str, layer: QuantizedLayer, inputs: tuple[int, ...]) -> int:
        """Add a layer and its wire; return its number, from 1. Repeated names get a suffix."""
        self.layer_counts[name] += 1
        layer_name, number = name, self.layer_counts[name]
        while layer_name in self.layers:
            layer_name = f"{name}_{layer.operator}{number}"
            number += 1
        self.layers[layer_name] = layer
        self.wires.append(Wire(layer=layer_name, inputs=inputs))
        return len(self.wires)

    def _read_levels(self, node: fx.Node) -> Levels:
        """Return the int8 levels of a (de)quantize node, of `changing_nodes` with headroom."""
        scale, zero, low, high, dtype = (
            self.read_number(argument) for argument in arguments_with_defaults(node)[1:6]
        )
        if dtype not in _INT8_SHIFTS:
            self.refuse(node, f"expected activations of int8 or uint8, got {dtype}")
        shift = _INT8_SHIFTS[dtype]
        headroom = self.training.headroom if node in self.changing_nodes else 1.0
        return Levels(
            scale=float(scale) * headroom,
            zero=int(zero) - shift,
            low=int(low) - shift,
            high=int(high) - shift,
        )

    def read_number(self, argument: Any) -> Any:
        """Return an argument, or its number if it is a constant node of one element."""
        if not isinstance(argument, fx.Node):
            return argument
        value = self.values.get(argument)
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            self.refuse(argument, "expected a constant number")
        return value.item()

    def read_quantized(self, node: fx.Node, argument: Any) -> QuantizedValue:
        """Return the quantized value of an operand; refuse padded values and other operands."""
        value = self.values.get(argument) if isinstance(argument, fx.Node) else None
        if not isinstance(value, QuantizedValue):
            operand_name = operator_name(argument) if isinstance(argument, fx.Node) else argument
            reason = (
                f"its operand ({operand_name}) is not quantized, or is padded; quantize it, or end "
                "the front"
            )
            self.refuse(node, reason)
        return value

    def read_constant(self, node: fx.Node, argument: Any) -> torch.Tensor:
        """Return the tensor of a constant operand; refuse other operands."""
        value = self.values.get(argument)
        if not isinstance(value, torch.Tensor):
            self.refuse(node, f"expected a constant instead of {argument}")
        return value

    def read_weight(self, node: fx.Node, argument: fx.Node) -> tuple[torch.Tensor, torch.Tensor]:
        """Return an int8 weight and its scale for each output; a single scale is repeated."""
        name = operator_name(argument)
        if name not in ("dequantize_per_channel", "dequantize_per_tensor"):
            self.refuse(node, f"its weight is not quantized to int8 ({name}); quantize it")
        arguments = arguments_with_defaults(argument)
        int8_weight = self.read_constant(node, arguments[0])
        if int8_weight.dtype is not torch.int8:
            self.refuse(node, f"expected a weight of int8, got {int8_weight.dtype}")
        scales = self._read_tensor(node, arguments[1]).double().flatten()
        zeros = self._read_tensor(node, arguments[2])
        if bool(zeros.any()):
            self.refuse(
                node,
                "its weight has zero points other than 0; quantize weights symmetrically "
                "(qscheme per_channel_symmetric)",
            )
        if name == "dequantize_per_channel" and arguments[3] != 0:
            self.refuse(node, f"its weight has scales along axis {arguments[3]}; expected axis 0")
        return int8_weight, scales.expand(int8_weight.shape[0]) if scales.numel() == 1 else scales

    def _read_tensor(self, node: fx.Node, argument: Any) -> torch.Tensor:
        """Return a number or constant operand as a tensor; None counts as 0."""
        if isinstance(argument, fx.Node):
            return self.read_constant(node, argument)
        return torch.as_tensor(0 if argument is None else argument)

    def read_weight_and_constants(
        self, node: fx.Node, weight: Any, bias: Any, source: QuantizedValue
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Return the int8 weight of a layer, its scales, and the constants of its sums by buffer.

        ``start`` is minus the input's zero point times the sum of weights. Refuses sums that may
        exceed 32 bits.
        """
        int8_weight, scales = self.read_weight(node, weight)
        max_sum = int8_weight.double().abs().flatten(1).sum(1).max()
        if max_sum * _MAX_CENTRED_BYTE > _MAX_INT32 or int8_weight[0].numel() > _MAX_PRODUCTS:
            self.refuse(
                node,
                "its sums may have more than 32 bits or 65,535 products; use fewer input channels",
            )
        bias_values = (
            torch.zeros(int8_weight.shape[0])
            if bias is None
            else self.read_constant(node, bias).float()
        )
        sum_scales = (scales * source.levels.scale).float()
        initial_sums = -source.levels.zero * int8_weight.to(torch.int64).flatten(1).sum(1)
        constants = {
            "start": initial_sums.to(torch.int32),
            "scale": sum_scales,
            "bias": bias_values.clone(),
        }
        return int8_weight, scales.float(), constants

    def _make_rescaling(self, node: fx.Node, source: QuantizedValue) -> PendingLayer:
        """Return a pending layer of `node` that converts a quantized value to other levels."""

        def make_layer(levels: Levels) -> QuantizedLayer | None:
            old_levels = source.levels
            has_same_scale = (levels.scale, levels.zero) == (old_levels.scale, old_levels.zero)
            if has_same_scale and levels.low <= old_levels.low and levels.high >= old_levels.high:
                return None
            return _rescaling_layer(old_levels, levels)

        return PendingLayer(
            node=node,
            inputs=(source,),
            make_layer=make_layer,
            flattened_shape=source.flattened_shape,
        )

    def clamp_operand(self, node: fx.Node, low: float, high: float) -> PendingLayer:
        """Return the operand of an activation as a pending layer, clamped to real limits."""
        value = self.values[node.args[0]]
        if isinstance(value, QuantizedValue):
            value = self._make_rescaling(node, value)
        if not isinstance(value, PendingLayer):
            self.refuse(node, "its operand is neither quantized nor computed by an int8 kernel")
        return replace(value, clamp=(max(low, value.clamp[0]), min(high, value.clamp[1])))

    def add_layer_with_input_levels(
        self, node: fx.Node, layer: QuantizedLayer, source: QuantizedValue
    ) -> QuantizedValue:
        """Add a layer whose result has the levels of its input; return the quantized result."""
        return replace(
            source,
            layer_number=self._add_layer(_layer_name(node), layer, (source.layer_number,)),
        )

    def read_shape(self, node: fx.Node, argument: fx.Node) -> tuple[int, ...]:
        """Return the shape of an operand, or refuse `node` if the shape is unknown."""
        while is_quantizing(argument) and "val" not in argument.meta:
            argument = argument.args[0]
        value = argument.meta.get("val")
        if value is None:
            self.refuse(node, "its shape is unknown; pass the module that convert_pt2e returned")
        return tuple(value.shape)

    def refuse(self, node: fx.Node, reason: str) -> NoReturn:
        """Raise `InputError` with the operator of a node, its module and the reason."""
        path = module_path(node)
        module_text = f" in {path!r}" if path else ""
        self._raise_error(f"{operator_name(node)}{module_text}: {reason}")

    def _raise_error(self, message: str) -> NoReturn:
        raise InputError(f"{self.label}: {message}")


def _rescaling_layer(old_levels: Levels, new_levels: Levels) -> QuantizedLayer:
    """Return the layer that converts bytes to other levels: means of one element each."""
    window_arguments = ((1, 1), (1, 1), (0, 0, 0, 0), to_float32(old_levels.scale), old_levels.zero)
    return QuantizedLayer("average", {}, (*window_arguments, *new_levels.rounding))


def _layer_name(node: fx.Node) -> str:
    """Return the path of a node's module, with ``_`` for ``.``; without a module, its operator."""
    return module_path(node).replace(".", "_") or operator_name(node)


def _ancestor_nodes(result: Any) -> set[fx.Node]:
    """Return the nodes that a result, a node or a list of nodes, depends on, and those nodes."""
    ancestors: set[fx.Node] = set()
    results = result if isinstance(result, tuple | list) else [result]
    pending_nodes = [node for node in results if isinstance(node, fx.Node)]
    while pending_nodes:
        node = pending_nodes.pop()
        if node not in ancestors:
            ancestors.add(node)
            pending_nodes += node.all_input_nodes
    return ancestors
