"""The registry of operators: what a node is, which of its inputs are numbers, and which weights.

Values are tensors, or *numbers*: what is known without one, such as shapes and the constants that
code is written with. Numbers are plain Python (a number, or nested tuples of them), so that a
capture, and Dynamo, see constants. An operator all of whose inputs are numbers is evaluated by
ONNX's reference. A sequence is a list of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from poetmodel.errors import InputError
from poetmodel.torch.onnx.reading import shortest

if TYPE_CHECKING:
    from poetmodel.torch.onnx.reading import NodeRecord

Numbers: TypeAlias = "bool | int | float | tuple[Numbers, ...]"
Value: TypeAlias = "torch.Tensor | Numbers | None"
Run: TypeAlias = Callable[..., Any]

MOST_NUMBERS: Final = 4096
"""Most elements of numbers; more become a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """How a node of some kind is run, and what its inputs are for."""

    run: Run
    """Called with the node and its inputs; returns one value, or a tuple of tensors."""
    numbers: frozenset[int]
    """Positions of inputs that must be numbers."""
    weights: frozenset[int]
    """Positions of inputs that are weights, wherever the file keeps them."""
    statistics: frozenset[int]
    """Positions of inputs that are statistics of batches."""
    first_output_only: bool
    """Whether no node may read a further output."""
    refuses: str
    """The attributes and values that are not known, for the guide; or empty."""


OPERATORS: Final[dict[str, Operator]] = {}
"""By the name of the operator; the modules of this package fill it."""


def operator(
    *names: str,
    numbers: Sequence[int] = (),
    weights: Sequence[int] = (),
    statistics: Sequence[int] = (),
    first_output_only: bool = False,
    refuses: str = "",
) -> Callable[[Run], Run]:
    """Return a decorator that registers how operators are run."""

    def register(run: Run) -> Run:
        for name in names:
            OPERATORS[name] = Operator(
                run=run,
                numbers=frozenset(numbers),
                weights=frozenset(weights),
                statistics=frozenset(statistics),
                first_output_only=first_output_only,
                refuses=refuses,
            )
        return run

    return register


class OnnxNode(nn.Module):  # type: ignore[misc, unused-ignore]
    """A node of a file: an operator with its attributes. A capture tells its name."""

    def __init__(self, record: NodeRecord, *, opset: int) -> None:
        super().__init__()
        self.name = record.name
        self.operator = record.operator
        self.attributes = dict(record.attributes)
        self.opset = opset
        self.wanted = len(record.outputs)
        """Number of outputs."""
        self.proto: bytes = _alone(record.proto, opset)

    def forward(self, *values: Value) -> Any:
        """Return the output; a tuple of tensors where there are several."""
        if self.operator in _OF_SHAPES:
            return OPERATORS[self.operator].run(self, *values)
        if not any(isinstance(value, torch.Tensor | list) for value in values):
            outputs = evaluated(self.proto, *values)
            if outputs is not None:
                return outputs[0] if self.wanted == 1 else outputs
        return OPERATORS[self.operator].run(self, *values)

    def get(self, attribute: str, default: Any = None) -> Any:
        """Return an attribute, or its default."""
        return self.attributes.get(attribute, default)

    def refused(self, why: str) -> InputError:
        """Return the error for a node that cannot be run as it is."""
        return InputError(f"node {self.name!r} ({self.operator}): {why}")

    def only_first(self, values: Any) -> Any:
        """Return a value for all outputs of a node, of which but the first may not be used."""
        return values if self.wanted == 1 else (values, *[None] * (self.wanted - 1))


_OF_SHAPES: Final = frozenset(("Shape", "Size"))


def _alone(proto: Any, opset: int) -> bytes:
    """Return a model of one node, for the reference."""
    from onnx import TensorProto, helper

    def named(name: str) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None)

    graph = helper.make_graph(
        [proto],
        "alone",
        [named(name) for name in dict.fromkeys(filter(None, proto.input))],
        [named(name) for name in filter(None, proto.output)],
    )
    bytes_: bytes = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", opset)]
    ).SerializeToString()
    return bytes_


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator, unused-ignore]
def evaluated(proto: bytes, *values: Numbers | None) -> tuple[Numbers, ...] | None:
    """Return the result of a node on numbers; None if that is more than `MOST_NUMBERS`."""
    return _evaluated(proto, values, repr(values))


@lru_cache(maxsize=4096)
def _evaluated(
    proto: bytes, values: tuple[Numbers | None, ...], _: str
) -> tuple[Numbers, ...] | None:
    """Evaluate a node; the last argument tells 1 from 1.0 and True, which are equal."""
    reference = _reference(proto)
    named = zip(reference.proto_.graph.node[0].input, values, strict=True)
    given = {name: array(value) for name, value in named if value is not None}
    outputs = [np.asarray(output) for output in reference.run(None, given)]
    if sum(output.size for output in outputs) > MOST_NUMBERS:
        return None
    return tuple(plain(output) for output in outputs)


@lru_cache(maxsize=4096)
def _reference(proto: bytes) -> Any:
    import onnx
    from onnx.reference import ReferenceEvaluator

    return ReferenceEvaluator(onnx.ModelProto.FromString(proto))


def array(value: Numbers) -> np.ndarray:
    """Return numbers as an array: whole ones as int64, others as float32."""
    elements = np.array(value)
    if elements.size == 0:
        return elements.astype(np.int64)
    return elements.astype(np.float32) if elements.dtype.kind == "f" else elements


def plain(elements: np.ndarray) -> Numbers:
    """Return an array as numbers."""

    def tupled(value: Any) -> Any:
        if isinstance(value, list):
            return tuple(map(tupled, value))
        return shortest(value) if isinstance(value, float) else value

    return tupled(elements.tolist())  # type: ignore[no-any-return]


# -- what inputs are ---------------------------------------------------------------------------


def tensor(value: Any, like: torch.Tensor | None = None) -> torch.Tensor:
    """Return a tensor or a sequence; numbers become a tensor of the floating type of another."""
    if isinstance(value, torch.Tensor | list):
        return value
    first = value
    while isinstance(first, tuple) and first:
        first = first[0]
    dtype = torch.bool if isinstance(first, bool) else torch.int64
    if isinstance(first, float):
        known = like is not None and like.is_floating_point()
        dtype = like.dtype if known and like is not None else torch.get_default_dtype()
    return torch.tensor(value, dtype=dtype, device=None if like is None else like.device)


def tensors(*values: Any) -> tuple[Any, ...]:
    """Return values as tensors of one device and floating type; None stays None."""
    known = [value for value in values if isinstance(value, torch.Tensor)]
    like = next((value for value in known if value.is_floating_point()), next(iter(known), None))
    return tuple(None if value is None else tensor(value, like) for value in values)


def operands(x: Any, y: Any) -> tuple[Any, Any]:
    """Return two operands, at least one of which is a tensor; a single number stays one."""
    if isinstance(x, torch.Tensor) and not isinstance(y, tuple):
        return x, y
    if isinstance(y, torch.Tensor) and not isinstance(x, tuple):
        return x, y
    first, second = tensors(x, y)
    return first, second


def whole(node: OnnxNode, value: Any, what: str) -> list[int]:
    """Return whole numbers; raise if they depend on the values of tensors."""
    return [int(number) for number in real(node, value, what)]


def real(node: OnnxNode, value: Any, what: str) -> list[float]:
    """Return numbers in their order; raise if they depend on the values of tensors."""
    if isinstance(value, torch.Tensor):
        raise node.refused(
            f"its {what} depends on the values of tensors; expected a constant, or one that "
            "follows from the shapes of the inputs"
        )
    return list(value) if isinstance(value, tuple) else [value]


def axes_of(node: OnnxNode, value: Any, *, rank: int) -> list[int] | None:
    """Return the axes that a node names by an input or an attribute, from 0; None without any."""
    given = node.get("axes") if value is None else tuple(whole(node, value, "axes"))
    return None if given is None else [axis % rank for axis in given]


def axis_of(node: OnnxNode, rank: int, default: int = 0) -> int:
    """Return an axis, from 0."""
    return int(node.get("axis", default)) % max(rank, 1)


def index_select(x: torch.Tensor, axis: int, places: list[int]) -> torch.Tensor:
    """Return the elements at some positions of an axis."""
    if not places:
        return x.narrow(axis, 0, 0)
    if places == list(range(places[0], places[0] + len(places))):
        return x.narrow(axis, places[0], len(places))
    at = torch.tensor(places, device=x.device)
    if axis == 0 and x.ndim == 2 and x.is_floating_point():  # noqa: PLR2004
        return functional.embedding(at, x)
    return x[(*[slice(None)] * axis, at)]


def shape_of(value: Any) -> tuple[int, ...]:
    """Return the shape of a tensor, or of numbers."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    sizes = []
    while isinstance(value, tuple):
        sizes.append(len(value))
        value = value[0] if value else 0
    return tuple(sizes)


def flat(value: Numbers) -> list[Any]:
    """Return numbers in their order, without their shape."""
    if isinstance(value, tuple):
        return [number for part in value for number in flat(part)]
    return [value]


def volume(sizes: Iterable[int]) -> int:
    """Return the product of sizes."""
    return prod(sizes)
