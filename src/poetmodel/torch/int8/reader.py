"""The reader of modules that PT2E has converted: each operator with what is around it.

PT2E writes ``dequantize -> operator -> activation -> quantize`` in place of each operator. The
operators between, in float, are read by their patterns, and become one layer at the quantize.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
from torch import fx

from poetmodel.errors import InputError
from poetmodel.torch.graph.operators import module_path, operator_name
from poetmodel.torch.int8.front import QuantizedFront, QuantizedLayer, Wire
from poetmodel.torch.int8.levels import Levels, single
from poetmodel.torch.int8.training import ROUNDINGS, QuantizedNetwork, TrainedLayer
from poetmodel.torch.int8.values import INPUT, Bytes, Padded, Unfinished, arguments_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

NAMESPACE: Final = "quantized_decomposed"
"""Of the operators by which PT2E says what is quantized, and how."""
_TYPES: Final = {torch.int8: 0, torch.uint8: 128}
"""Types of activations, and what is taken from bytes of each, and from its zero, for int8."""
_ALL: Final = (-128, 127)
"""The limits of int8."""
_MOST: Final = 2**31 - 1
_PRODUCTS: Final = 65_535
"""Most products of a sum in a kernel."""
_SPAN: Final = 256
"""What a weight is multiplied by is less, so that no part of a sum has more than 32 bits."""


@dataclass(frozen=True, slots=True)
class Training:
    """The layers of a converted module that train, and how."""

    nodes: frozenset[fx.Node]
    """Convolutions and linear layers of its graph."""
    rounding: str = ROUNDINGS[0]
    """One of `ROUNDINGS`."""
    headroom: float = 1.0
    """Factor of the scales of their weights, and of all activations behind the first of them."""

    def behind(self) -> frozenset[fx.Node]:
        """Return the nodes whose values change when the layers train."""
        behind = set(self.nodes)
        for node in next(iter(behind)).graph.nodes if behind else ():
            if behind & set(node.all_input_nodes):
                behind.add(node)
        return frozenset(behind)


def is_quantizing(node: fx.Node) -> bool:
    """Return whether a node quantizes or dequantizes, or computes a scale, as PT2E states it."""
    return node.op == "call_function" and getattr(node.target, "namespace", "") == NAMESPACE


@dataclass(slots=True)
class Reader:
    """Reads one converted module."""

    module: Any
    where: str
    training: Training
    patterns: Mapping[Any, Callable[[Reader, fx.Node], Any]]
    """How each operator between a dequantize and a quantize is read."""
    values: dict[fx.Node, Any] = field(default_factory=dict)
    layers: dict[str, QuantizedLayer] = field(default_factory=dict)
    wires: list[Wire] = field(default_factory=list)
    names: Counter[str] = field(default_factory=Counter)
    flat: bool = False
    behind: frozenset[fx.Node] = field(init=False)
    """Nodes whose values change in training; their scales have headroom."""

    def __post_init__(self) -> None:
        self.behind = self.training.behind()

    def read(self) -> QuantizedFront:
        """Return the front."""
        graph = self.module.graph
        result = graph.output_node().args[0]
        results = list(result) if isinstance(result, tuple | list) else [result]
        given = graph.find_nodes(op="placeholder")
        if len(results) != 1 or len(given) != 1:
            self._fault(
                f"expected one input and one result, got {len(given)} and {len(results)}; "
                "quantize the part of the model that has one of each"
            )
        needed = _needed(results[0])
        for node in graph.nodes:
            if node in needed:
                self.values[node] = self._value(node)
        self._finish(results[0])
        made = QuantizedNetwork if self.training.nodes else QuantizedFront
        return made(self.layers, self.wires, flat=self.flat)

    def check_operators(self) -> None:
        """Raise `InputError` for the first operator that has no pattern.

        The module may be prepared alone: ranges of activations need not be known. Operators whose
        inputs are all constants, sizes, and operators that the result does not need are allowed.
        """
        graph = self.module.graph
        needed = _needed(graph.output_node().args[0])
        varying = set(graph.find_nodes(op="placeholder"))
        for node in graph.nodes:
            if not varying.intersection(node.all_input_nodes):
                continue
            varying.add(node)
            known = is_quantizing(node) or node.target in self.patterns
            is_size = isinstance(node.meta.get("val"), int | torch.SymInt)
            if node.op == "call_function" and node in needed and not known and not is_size:
                self.refuse(node, self._unknown(node))

    def _finish(self, node: fx.Node) -> None:
        """Add what returns the result in float."""
        value = self.values[node]
        of_dequantize = isinstance(value, Bytes) and not (
            is_quantizing(node) and operator_name(node).startswith("quantize")
        )
        if not of_dequantize:
            self.refuse(node, "it makes the result, which is not quantized; quantize the output")
        numbers = (single(value.levels.scale), value.levels.zero)
        self._add("dequantize", QuantizedLayer("dequantize", {}, numbers), (value.number,))
        self.flat = bool(value.planes)

    def _value(self, node: fx.Node) -> Any:
        """Return what a node stands for."""
        if node.op == "placeholder":
            return INPUT
        if node.op == "get_attr":
            return attrgetter(str(node.target))(self.module).detach()
        if node.op != "call_function":
            self.refuse(node, "it is no operator that has a kernel in int8")
        if all(isinstance(self.values[n], torch.Tensor) for n in node.all_input_nodes):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.values.__getitem__)
            with torch.no_grad():
                return node.target(*args, **kwargs)
        if isinstance(node.meta.get("val"), int | torch.SymInt):
            return None  # a size, such as that of a batch
        if is_quantizing(node):
            return self._quantizing(node)
        read = self.patterns.get(node.target)
        if read is None:
            self.refuse(node, self._unknown(node))
        return read(self, node)

    def _unknown(self, node: fx.Node) -> str:
        """Return why a node has no kernel in int8, and what to do."""
        if "batch_norm" in operator_name(node):
            return (
                "it is not right behind a convolution, of which it could become a part; move it "
                "there, or leave it out"
            )
        has, part = ("no kernel", "front")
        if self.training.nodes:
            has, part = ("neither a forward nor a backward kernel", "network")
        return (
            f"it has {has} in int8; end the {part} before it, or replace it (known are "
            "convolutions, linear layers, sums, pools, means, ReLU and ReLU6)"
        )

    def _quantizing(self, node: fx.Node) -> Any:
        name = operator_name(node)
        if name not in ("quantize_per_tensor", "dequantize_per_tensor"):
            kind = "weights and activations" if "choose" in name else "activations"
            self.refuse(
                node, f"expected {kind} with one scale that is known before; it has another form"
            )
        value, levels = self.values[node.args[0]], self._levels(node)
        padded = value if isinstance(value, Padded) else None
        value = value if padded is None else padded.of
        if name.startswith("dequantize"):
            if not isinstance(value, Bytes):
                self.refuse(node, "expected a quantized value")
            given = replace(value, levels=levels)
            return given if padded is None else replace(padded, of=given)
        if isinstance(value, str):
            layer = QuantizedLayer("quantize", {}, (levels.inverse, levels.zero))
            made = Bytes(number=self._add("quantize", layer, (0,)), levels=levels)
            if (levels.low, levels.high) != _ALL:
                clamping = _rescaling(levels, levels)
                made = self.done(node, clamping, made)
        else:
            if isinstance(value, Bytes):
                value = self._rescaled(node.args[0], value)
            if not isinstance(value, Unfinished):
                self.refuse(node, "what it quantizes has no kernel in int8")
            made = self._made(value, levels)
        if padded is not None:
            return replace(padded, of=made)
        self.wires[made.number - 1] = replace(self.wires[made.number - 1], node=node.name)
        return made

    def _made(self, value: Unfinished, levels: Levels) -> Bytes:
        """Add the layer whose result has some levels, unless it is there already."""
        bounded = levels.within(value.clamp)
        layer = value.make(bounded)
        if layer is None:
            (source,) = value.takes
            return replace(source, levels=bounded, planes=value.planes)
        if value.node in self.training.nodes:
            training = self.training
            layer = TrainedLayer(layer, rounding=training.rounding, headroom=training.headroom)
        number = self._add(_name(value.node), layer, tuple(source.number for source in value.takes))
        return Bytes(number=number, levels=bounded, planes=value.planes)

    def _add(self, name: str, layer: QuantizedLayer, takes: tuple[int, ...]) -> int:
        """Add a layer, and return its number."""
        self.names[name] += 1
        if self.names[name] > 1 or name in self.layers:
            name = f"{name}_{layer.operator}{self.names[name]}"
        self.layers[name] = layer
        self.wires.append(Wire(layer=name, takes=takes))
        return len(self.wires)

    def _levels(self, node: fx.Node) -> Levels:
        """Return the levels that a quantize or dequantize of an activation states."""
        scale, zero, low, high, dtype = (
            self.number(argument) for argument in arguments_of(node)[1:6]
        )
        if dtype not in _TYPES:
            self.refuse(node, f"expected activations of int8 or uint8, got {dtype}")
        less = _TYPES[dtype]
        wider = self.training.headroom if node in self.behind else 1.0
        return Levels(
            scale=float(scale) * wider,
            zero=int(zero) - less,
            low=int(low) - less,
            high=int(high) - less,
        )

    def number(self, argument: Any) -> Any:
        """Return a number that a node is given."""
        if not isinstance(argument, fx.Node):
            return argument
        value = self.values.get(argument)
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            self.refuse(argument, "expected a constant number")
        return value.item()

    def quantized(self, node: fx.Node, argument: Any) -> Bytes:
        """Return an operand that must be quantized."""
        value = self.values.get(argument) if isinstance(argument, fx.Node) else None
        if not isinstance(value, Bytes):
            what = operator_name(argument) if isinstance(argument, fx.Node) else argument
            why = f"its operand ({what}) is not quantized; quantize it, or end the front"
            self.refuse(node, why)
        return value

    def constant(self, node: fx.Node, argument: Any) -> torch.Tensor:
        """Return an operand that must be a constant."""
        value = self.values.get(argument)
        if not isinstance(value, torch.Tensor):
            self.refuse(node, f"expected a constant in place of {argument}")
        return value

    def weight(self, node: fx.Node, argument: fx.Node) -> tuple[torch.Tensor, torch.Tensor]:
        """Return an int8 weight and its scales, one for each result."""
        name = operator_name(argument)
        if name not in ("dequantize_per_channel", "dequantize_per_tensor"):
            self.refuse(node, f"its weight is not quantized to int8 ({name}); quantize it")
        arguments = arguments_of(argument)
        raw = self.constant(node, arguments[0])
        if raw.dtype is not torch.int8:
            self.refuse(node, f"expected a weight of int8, got {raw.dtype}")
        scales = self._all(node, arguments[1]).double().flatten()
        zeros = self._all(node, arguments[2])
        if bool(zeros.any()):
            self.refuse(
                node,
                "its weight has zero points other than 0; quantize weights symmetrically "
                "(qscheme per_channel_symmetric)",
            )
        if name == "dequantize_per_channel" and arguments[3] != 0:
            self.refuse(node, f"its weight has scales along axis {arguments[3]}; expected axis 0")
        return raw, scales.expand(raw.shape[0]) if scales.numel() == 1 else scales

    def _all(self, node: fx.Node, argument: Any) -> torch.Tensor:
        if isinstance(argument, fx.Node):
            return self.constant(node, argument)
        return torch.as_tensor(0 if argument is None else argument)

    def linear(
        self, node: fx.Node, weight: Any, bias: Any, source: Bytes
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the weight of a layer, and the constants that follow its sums."""
        raw, scales = self.weight(node, weight)
        total = raw.double().abs().flatten(1).sum(1).max()
        if total * _SPAN > _MOST or raw[0].numel() > _PRODUCTS:
            self.refuse(node, "its sums may have more than 32 bits; use fewer input channels")
        offsets = torch.zeros(raw.shape[0]) if bias is None else self.constant(node, bias).float()
        factors = (scales * source.levels.scale).float()
        start = -source.levels.zero * raw.to(torch.int64).flatten(1).sum(1)
        constants = {"start": start.to(torch.int32), "scale": factors, "bias": offsets.clone()}
        return raw, constants

    def _rescaled(self, node: fx.Node, source: Bytes) -> Unfinished:
        """Return the layer that gives a quantized value other levels, if they are others."""

        def make(levels: Levels) -> QuantizedLayer | None:
            old = source.levels
            is_same = (levels.scale, levels.zero) == (old.scale, old.zero)
            if is_same and levels.low <= old.low and levels.high >= old.high:
                return None
            return _rescaling(old, levels)

        return Unfinished(node=node, takes=(source,), make=make, planes=source.planes)

    def clamped(self, node: fx.Node, low: float, high: float) -> Unfinished:
        """Return what an activation is of, an operator or a quantized value, with its limits."""
        value = self.values[node.args[0]]
        if isinstance(value, Bytes):
            value = self._rescaled(node, value)
        if not isinstance(value, Unfinished):
            self.refuse(node, "what it is given has no kernel in int8")
        return replace(value, clamp=(max(low, value.clamp[0]), min(high, value.clamp[1])))

    def done(self, node: fx.Node, layer: QuantizedLayer, source: Bytes) -> Bytes:
        """Add a layer whose result has the levels of its input."""
        return replace(source, number=self._add(_name(node), layer, (source.number,)))

    def shape(self, node: fx.Node, argument: fx.Node) -> tuple[int, ...]:
        """Return the shape of what a node is given."""
        while is_quantizing(argument) and "val" not in argument.meta:
            argument = argument.args[0]
        value = argument.meta.get("val")
        if value is None:
            self.refuse(node, "its shape is not known; hand over what convert_pt2e returned")
        return tuple(value.shape)

    def refuse(self, node: fx.Node, why: str) -> NoReturn:
        """Raise `InputError` with an operator, its module, and the reason."""
        path = module_path(node)
        where = f" in {path!r}" if path else ""
        self._fault(f"{operator_name(node)}{where}: {why}")

    def _fault(self, fault: str) -> NoReturn:
        raise InputError(f"{self.where}: {fault}")


def _rescaling(old: Levels, new: Levels) -> QuantizedLayer:
    """Return the layer that gives bytes of some levels others: a mean of one element each."""
    one = ((1, 1), (1, 1), (0, 0, 0, 0), single(old.scale), old.zero)
    return QuantizedLayer("average", {}, (*one, *new.ending))


def _name(node: fx.Node) -> str:
    """Return what a layer is called: after its module."""
    return module_path(node).replace(".", "_") or operator_name(node)


def _needed(result: Any) -> set[fx.Node]:
    """Return the nodes that a result depends on."""
    needed: set[fx.Node] = set()
    results = result if isinstance(result, tuple | list) else [result]
    pending = [node for node in results if isinstance(node, fx.Node)]
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending += node.all_input_nodes
    return needed
