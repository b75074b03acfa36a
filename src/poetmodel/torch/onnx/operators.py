"""The registry of ONNX operators, nodes as modules, and helpers for their inputs.

A value is a tensor, a list of tensors (an ONNX sequence), or *numbers*: a plain Python number, or
nested tuples of numbers. Shapes and small constants are numbers, so that captures and Dynamo treat
them as constants. If all inputs of an operator are numbers, ONNX's reference computes it, with
the exceptions in `OnnxNode.forward`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from poetmodel.errors import InputError
from poetmodel.torch.onnx.reading import shorten_float

if TYPE_CHECKING:
    from poetmodel.torch.onnx.reading import NodeRecord

Numbers: TypeAlias = "bool | int | float | tuple[Numbers, ...]"
Value: TypeAlias = "torch.Tensor | Numbers | None"
Compute: TypeAlias = Callable[..., Any]

MAX_NUMBERS: Final = 4096
"""Maximum number of elements of *numbers*; larger constants become tensors, except inputs that must
be numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """The function that computes a kind of node, and the purpose of its inputs."""

    compute: Compute
    """Called with the node and its inputs; returns one value, or a tuple of values."""
    numbers: frozenset[int]
    """Positions of inputs that must be numbers."""
    weights: frozenset[int]
    """Positions of inputs that are weights, both as initializers and as Constant nodes."""
    statistics: frozenset[int]
    """Positions of inputs that are running statistics of batches."""
    tensors: frozenset[int]
    """Positions of inputs whose constants stay tensors, of their type, and do not train."""
    first_output_only: bool
    """Whether only the first output may be read."""
    unsupported_features: str
    """Unsupported attributes and values, for the documentation; empty if there are none."""


OPERATORS: Final[dict[str, Operator]] = {}
"""Operators by name. The modules of this package register them at import."""


def register_operator(
    *names: str,
    numbers: Sequence[int] = (),
    weights: Sequence[int] = (),
    statistics: Sequence[int] = (),
    tensors: Sequence[int] = (),
    first_output_only: bool = False,
    unsupported_features: str = "",
) -> Callable[[Compute], Compute]:
    """Register the decorated function for operators `names`; options are fields of `Operator`."""

    def register(compute: Compute) -> Compute:
        """Register the function under all names."""
        for name in names:
            OPERATORS[name] = Operator(
                compute=compute,
                numbers=frozenset(numbers),
                weights=frozenset(weights),
                statistics=frozenset(statistics),
                tensors=frozenset(tensors),
                first_output_only=first_output_only,
                unsupported_features=unsupported_features,
            )
        return compute

    return register


class OnnxNode(nn.Module):  # type: ignore[misc, unused-ignore]
    """A node of a file: operator and attributes. Captured operations have its name in the file."""

    def __init__(self, record: NodeRecord, *, opset: int) -> None:
        super().__init__()
        self.name = record.name
        self.operator = record.operator
        self.attributes = dict(record.attributes)
        self.opset = opset
        self.output_count = len(record.outputs)
        """Number of outputs."""
        self.proto: bytes = _single_node_model(record.proto, opset)
        """Serialized model of this node alone, for ONNX's reference."""

    def forward(self, *values: Value) -> Any:
        """Compute the output, or a tuple of outputs.

        ONNX's reference computes nodes on plain numbers, up to `MAX_NUMBERS` elements of output.
        """
        if self.operator in _SHAPE_OPERATORS:
            return OPERATORS[self.operator].compute(self, *values)
        if not any(isinstance(value, torch.Tensor | list) for value in values):
            outputs = evaluate_numbers(self.proto, *values)
            if outputs is not None:
                return outputs[0] if self.output_count == 1 else outputs
        return OPERATORS[self.operator].compute(self, *values)

    def get(self, attribute: str, default: Any = None) -> Any:
        """Return the value of an attribute, or the default."""
        return self.attributes.get(attribute, default)

    def unsupported_error(self, reason: str) -> InputError:
        """Return the `InputError` for a feature of this node that is not supported."""
        return InputError(f"node {self.name!r} ({self.operator}): {reason}")

    def pad_outputs(self, value: Any) -> Any:
        """Return the value, or a tuple with None for each further output of the node."""
        return value if self.output_count == 1 else (value, *[None] * (self.output_count - 1))


_SHAPE_OPERATORS: Final = frozenset(("Shape", "Size"))
"""Operators that need only the shape of their input."""


def _single_node_model(proto: Any, opset: int) -> bytes:
    """Return a serialized model of one node, for ONNX's reference."""
    from onnx import TensorProto, helper

    def make_value_info(name: str) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None)

    graph = helper.make_graph(
        [proto],
        "single_node",
        [make_value_info(name) for name in dict.fromkeys(filter(None, proto.input))],
        [make_value_info(name) for name in filter(None, proto.output)],
    )
    model_bytes: bytes = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", opset)]
    ).SerializeToString()
    return model_bytes


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator, unused-ignore]
def evaluate_numbers(proto: bytes, *values: Numbers | None) -> tuple[Numbers, ...] | None:
    """Compute a node on numbers with ONNX's reference; `proto` is its serialized model.

    None if the outputs have more than `MAX_NUMBERS` elements. Dynamo treats the result as constant.
    """
    return _evaluate_cached(proto, values, repr(values))


@lru_cache(maxsize=4096)
def _evaluate_cached(
    proto: bytes, values: tuple[Numbers | None, ...], _: str
) -> tuple[Numbers, ...] | None:
    """Compute a node on numbers, as `evaluate_numbers`, and cache the result.

    The third argument distinguishes 1, 1.0 and True, which compare equal, in the cache key.
    """
    evaluator = _make_evaluator(proto)
    named_values = zip(evaluator.proto_.graph.node[0].input, values, strict=True)
    arrays = {name: to_array(value) for name, value in named_values if value is not None}
    outputs = [np.asarray(output) for output in evaluator.run(None, arrays)]
    if sum(output.size for output in outputs) > MAX_NUMBERS:
        return None
    return tuple(to_numbers(output) for output in outputs)


@lru_cache(maxsize=4096)
def _make_evaluator(proto: bytes) -> Any:
    """Return ONNX's reference evaluator of a serialized model."""
    import onnx
    from onnx.reference import ReferenceEvaluator

    return ReferenceEvaluator(onnx.ModelProto.FromString(proto))


def to_array(value: Numbers) -> np.ndarray:
    """Return numbers as an array: floats as float32, booleans as bool, integers or () as int64."""
    elements = np.array(value)
    if elements.size == 0:
        return elements.astype(np.int64)
    return elements.astype(np.float32) if elements.dtype.kind == "f" else elements


def to_numbers(elements: np.ndarray) -> Numbers:
    """Return an array as a number or nested tuples, with floats rounded by `shorten_float`."""

    def to_tuples(value: Any) -> Any:
        if isinstance(value, list):
            return tuple(map(to_tuples, value))
        return shorten_float(value) if isinstance(value, float) else value

    return to_tuples(elements.tolist())  # type: ignore[no-any-return]


# -- conversion of inputs ----------------------------------------------------------------------


def to_tensor(value: Any, template: torch.Tensor | None = None) -> torch.Tensor:
    """Return a number or a tuple of numbers as a tensor; tensors and lists are unchanged.

    Floats get the type of `template` if that is floating-point; integers become int64.
    """
    if isinstance(value, torch.Tensor | list):
        return value
    element = value
    while isinstance(element, tuple) and element:
        element = element[0]
    dtype = torch.bool if isinstance(element, bool) else torch.int64
    if isinstance(element, float):
        is_floating = template is not None and template.is_floating_point()
        dtype = (
            template.dtype if is_floating and template is not None else torch.get_default_dtype()
        )
    return torch.tensor(value, dtype=dtype, device=None if template is None else template.device)


def to_tensors(*values: Any) -> tuple[Any, ...]:
    """Return all values as tensors, except None and lists, which stay unchanged.

    Device and floating-point type are those of the first (floating-point) tensor.
    """
    tensor_values = [value for value in values if isinstance(value, torch.Tensor)]
    template = next(
        (value for value in tensor_values if value.is_floating_point()),
        next(iter(tensor_values), None),
    )
    return tuple(None if value is None else to_tensor(value, template) for value in values)


def to_operands(x: Any, y: Any) -> tuple[Any, Any]:
    """Return two operands as tensors; a single number beside a tensor stays a number."""
    if isinstance(x, torch.Tensor) and not isinstance(y, tuple):
        return x, y
    if isinstance(y, torch.Tensor) and not isinstance(x, tuple):
        return x, y
    x_tensor, y_tensor = to_tensors(x, y)
    return x_tensor, y_tensor


def to_integers(node: OnnxNode, value: Any, description: str) -> list[int]:
    """Return numbers as truncated integers; refuse a tensor. `description` names the input."""
    return [int(number) for number in to_number_list(node, value, description)]


def to_number_list(node: OnnxNode, value: Any, description: str) -> list[float]:
    """Return a tuple or a single number as a list: ``(1, 2)`` -> [1, 2], ``1`` -> [1].

    Raises the error of `node` for a tensor; `description` names the value in the message.
    """
    if isinstance(value, torch.Tensor):
        raise node.unsupported_error(
            f"its {description} depends on the values of tensors; expected a constant, or a "
            "value that follows from the shapes of the inputs"
        )
    return list(value) if isinstance(value, tuple) else [value]


def read_axes(node: OnnxNode, value: Any, *, rank: int) -> list[int] | None:
    """Return the axes of the input `value` or of the attribute ``axes``, from 0, or None."""
    axes = node.get("axes") if value is None else tuple(to_integers(node, value, "axes"))
    return None if axes is None else [axis % rank for axis in axes]


def read_axis(node: OnnxNode, rank: int, default: int = 0) -> int:
    """Return the attribute ``axis``, or `default` without it, counted from 0."""
    return int(node.get("axis", default)) % max(rank, 1)


def select_positions(x: torch.Tensor, axis: int, positions: list[int]) -> torch.Tensor:
    """Return the elements at the given positions of an axis, as a view if they are consecutive."""
    if not positions:
        return x.narrow(axis, 0, 0)
    if positions == list(range(positions[0], positions[0] + len(positions))):
        return x.narrow(axis, positions[0], len(positions))
    index_tensor = torch.tensor(positions, device=x.device)
    if axis == 0 and x.ndim == 2 and x.is_floating_point():  # noqa: PLR2004
        return functional.embedding(index_tensor, x)
    return x[(*[slice(None)] * axis, index_tensor)]


def shape_of(value: Any) -> tuple[int, ...]:
    """Return the shape of a tensor or of numbers; () for a single number, None or a list."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    sizes = []
    while isinstance(value, tuple):
        sizes.append(len(value))
        value = value[0] if value else 0
    return tuple(sizes)


def flatten_numbers(value: Numbers) -> list[Any]:
    """Return numbers as a flat list."""
    if isinstance(value, tuple):
        return [number for item in value for number in flatten_numbers(item)]
    return [value]
