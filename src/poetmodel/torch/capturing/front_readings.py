"""Values that Python code reads of tensors: constants of a capture, checked before steps.

While Dynamo traces a step, a torch function mode answers what Python reads (``.item()``, ``if
mask.all():``, a shape that depends on a mask) from recorded values, which Dynamo guards. The
tensors that were read become outputs of the graph. Readings of inputs and buffers are computed
again before a step. Tests for finite numbers, and assertions of PyTorch, may depend on parameters
and random numbers: they are checked at its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import fx
from torch.distributions import constraints
from torch.overrides import TorchFunctionMode

from poetmodel.torch.capturing.front_private import all_true, example_value, frames_in
from poetmodel.torch.errors import FOREIGN_ERRORS, CaptureError, at_line
from poetmodel.torch.graph.tensors import storage_key, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    Values = dict[str, list[Any]]
    """Recorded values by kind, in the order of reading."""
    Tensors = dict[str, list[torch.Tensor]]

KINDS: Final = ("flag", "number", "list", "count", "assertion")
"""Kinds of readings. Each has a list of its own, because libraries read less while they are traced:
a reading that is left out must not shift those of other kinds."""

_DESCRIPTIONS: Final = {
    "assertion": "number that is checked",
    "count": "number that decides a shape",
}


def empty_readings() -> dict[str, list[Any]]:
    """Return lists without readings, by kind."""
    return {kind: [] for kind in KINDS}


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator, unused-ignore]
def mark_reading(tensor: torch.Tensor, kind: str, index: int) -> torch.Tensor:  # noqa: ARG001
    """Return a copy of a tensor that Python reads; its node in a graph of Dynamo marks it."""
    return tensor.detach().clone()


_READERS: Final = {
    torch.Tensor.item,
    torch.Tensor.__bool__,
    torch.Tensor.__int__,
    torch.Tensor.__float__,
    torch.Tensor.__index__,
}
_COMPARISONS: Final = ("ge", "gt", "le", "lt", "eq", "ne")
_COMBINATIONS: Final = ("logical_or", "logical_and", "logical_not", "isfinite", "isnan", "isinf")
_REDUCTIONS: Final = ("all", "any")
_FLAG_FUNCTIONS: Final = {
    getattr(owner, name)
    for owner in (torch, torch.Tensor)
    for name in (*_COMPARISONS, *_COMBINATIONS, *_REDUCTIONS)
} | {getattr(torch.Tensor, f"__{name}__") for name in (*_COMPARISONS, "or", "and", "invert")}
_FLAG_FUNCTIONS.add(all_true)  # of the checks of distributions
"""Functions whose result of one Boolean element Python may test."""
_FINITE_TESTS: Final = {"isfinite", "isnan", "isinf", "_is_all_true"}


class Flag:
    """A tensor of one Boolean element, whose value Python may read; functions get the tensor."""

    def __init__(self, tensor: torch.Tensor, mode: Readings) -> None:
        self.tensor, self.mode = tensor, mode

    def __bool__(self) -> bool:
        return bool(self.mode.read(self.tensor, self.mode.flag_kind))

    item = __bool__

    def __invert__(self) -> Flag:
        return Flag(self.tensor.logical_not(), self.mode)

    def __or__(self, other: Any) -> Flag:
        return Flag(self.tensor | _plain(other), self.mode)

    def __and__(self, other: Any) -> Flag:
        return Flag(self.tensor & _plain(other), self.mode)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*[_plain(value) for value in args], **(kwargs or {}))


def _plain(value: Any) -> Any:
    return value.tensor if isinstance(value, Flag) else value


class Readings(TorchFunctionMode):  # type: ignore[misc, unused-ignore]
    """Answers what Python reads in a forward pass, and collects the tensors that were read.

    `values` and `tensors` are by kind; an eager pass records missing values.
    """

    def __init__(self, values: Values, tensors: Tensors, *, flag_kind: str = "flag") -> None:
        super().__init__()
        self.values, self.tensors, self.flag_kind = values, tensors, flag_kind

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer a reading; otherwise call the function, and wrap its result in a `Flag`."""
        keywords = kwargs or {}
        args = [_plain(value) for value in args]
        # Dynamo finds no methods that are written in Python in a dict.
        answer = _answer_unique if func is torch.Tensor.unique else _ANSWERS.get(func)
        if answer is not None:
            value = answer(self, *args, **keywords)
            if value is not NotImplemented:
                return value
        result = func(*args, **keywords)
        if (
            func in _FLAG_FUNCTIONS
            and isinstance(result, torch.Tensor)
            and result.dim() == 0
            and result.dtype == torch.bool
        ):
            return Flag(result, self)
        return result

    def read(self, tensor: torch.Tensor, kind: str) -> Any:
        """Append a copy of a tensor to `tensors`; return its recorded value."""
        index = len(self.tensors[kind])
        self.tensors[kind].append(mark_reading(tensor, kind, index))
        if index == len(self.values[kind]):
            self.values[kind].append(tensor.detach().cpu().numpy().tolist())
        return self.values[kind][index]


def _answer_number(mode: Readings, tensor: torch.Tensor) -> Any:
    return mode.read(tensor.reshape(()), "number")


def _answer_list(mode: Readings, tensor: torch.Tensor) -> Any:
    return mode.read(tensor, "list")


def _answer_equal(mode: Readings, a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool(mode.read((a == b).all(), "flag"))


def _answer_item(mode: Readings, tensor: torch.Tensor, index: Any) -> Any:
    if isinstance(index, torch.Tensor) and index.dtype == torch.bool:
        return tensor[_answer_nonzero(mode, index).unbind(1)]
    if isinstance(index, tuple) and any(_has_tensors(item) or _is_mask(item) for item in index):
        items: list[Any] = []
        for item in index:
            if _is_mask(item):
                items += _answer_nonzero(mode, item).unbind(1)
            else:
                items.append(_plain_slice(mode, item))
        return tensor[tuple(items)]
    return NotImplemented


def _is_mask(index: Any) -> bool:
    """Return whether an index is a tensor of flags for each element, whose number is read."""
    return isinstance(index, torch.Tensor) and index.dtype == torch.bool and index.dim() > 0


def _has_tensors(index: Any) -> bool:
    """Return whether an index is a slice with a tensor as a bound."""
    if not isinstance(index, slice):
        return False
    return any(isinstance(bound, torch.Tensor) for bound in (index.start, index.stop, index.step))


def _plain_slice(mode: Readings, index: Any) -> Any:
    """Return one item of an index; in a slice, read bounds that are tensors, as numbers."""
    if not _has_tensors(index):
        return index
    bounds = [
        mode.read(bound, "number") if isinstance(bound, torch.Tensor) else bound
        for bound in (index.start, index.stop, index.step)
    ]
    return slice(*bounds)


def _answer_select(mode: Readings, tensor: torch.Tensor, mask: torch.Tensor) -> Any:
    shape = torch.broadcast_shapes(tensor.shape, mask.shape)
    return tensor.expand(shape)[_answer_nonzero(mode, mask.expand(shape)).unbind(1)]


def _answer_nonzero(mode: Readings, tensor: torch.Tensor, **keywords: Any) -> Any:
    """Return the indices of elements that are not zero; their number is read."""
    if keywords:
        return NotImplemented
    return torch.nonzero_static(tensor, size=mode.read((tensor != 0).sum(), "count"))


def _answer_where(mode: Readings, condition: torch.Tensor, *branches: Any, **keywords: Any) -> Any:
    if branches or keywords:
        return NotImplemented
    return _answer_nonzero(mode, condition).unbind(1)


def _answer_repeat(
    mode: Readings, tensor: torch.Tensor, repeats: Any = None, dim: Any = None, **keywords: Any
) -> Any:
    if not isinstance(repeats, torch.Tensor) or keywords:
        return NotImplemented
    size = mode.read(repeats.sum(), "count")
    return torch.repeat_interleave(tensor, repeats, dim, output_size=size)


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator, unused-ignore]
def ctc_loss(log_probs: torch.Tensor, targets: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """Stand for ``torch.ctc_loss``, whose inner shapes depend on values; has its shape and type."""
    del targets
    *_, reduction, _ = arguments
    loss: torch.Tensor = log_probs.sum((0, 2)[: log_probs.dim() - 1 or 1])
    return loss if reduction in (0, "none") else loss.sum()


def _answer_ctc_loss(
    mode: Readings,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: Any = 1,
    zero_infinity: bool = False,  # noqa: FBT001, FBT002 - as the function
) -> Any:
    """Return a loss whose lengths AOTAutograd reads; eager passes call the function itself."""
    del mode
    if not torch.compiler.is_compiling():
        return NotImplemented
    reductions = {"none": 0, "mean": 1, "sum": 2}
    number = reductions.get(reduction, reduction)
    lengths = (input_lengths, target_lengths)
    return ctc_loss(log_probs, targets, *lengths, blank, number, zero_infinity)


_gaussian_nll_loss: Final = FunctionType(
    torch.nn.functional.gaussian_nll_loss.__code__,
    {**vars(torch.nn.functional), "has_torch_function_variadic": lambda *_: False},
    argdefs=torch.nn.functional.gaussian_nll_loss.__defaults__,
)
"""The function itself, which Dynamo traces rather than adds to a graph as one operation."""


def _answer_gaussian_nll_loss(mode: Readings, *args: Any, **keywords: Any) -> Any:
    """Call the function, whose test for negative variances is an assertion."""
    with Readings(mode.values, mode.tensors, flag_kind="assertion"):
        return _gaussian_nll_loss(*args, **keywords)


def _answer_unique(
    mode: Readings,
    tensor: torch.Tensor,
    sorted: bool = True,  # noqa: FBT001, FBT002 - as the function
    return_inverse: bool = False,  # noqa: FBT001, FBT002
    return_counts: bool = False,  # noqa: FBT001, FBT002
    dim: int | None = None,
) -> Any:
    """Return distinct values without a gradient; their number is read."""
    if not sorted or dim is not None or tensor.requires_grad or not tensor.numel():
        return NotImplemented
    ordered, order = tensor.flatten().sort()  # as the function: of 0.0 and -0.0 the same stays
    is_first = torch.cat([torch.ones_like(order[:1]) > 0, ordered[1:] != ordered[:-1]])
    firsts = _answer_nonzero(mode, is_first).squeeze(1)
    results = [ordered[firsts]]
    if return_inverse:
        ranks = is_first.cumsum(0) - 1
        results.append(torch.empty_like(order).scatter(0, order, ranks).view(tensor.shape))
    if return_counts:
        results.append(torch.cat([firsts[1:], firsts.new_full((1,), tensor.numel())]) - firsts)
    return tuple(results) if len(results) > 1 else results[0]


def _answer_one_hot(mode: Readings, tensor: torch.Tensor, num_classes: int = -1) -> Any:
    if num_classes >= 0:
        return NotImplemented
    count = mode.read(tensor.max() + 1, "count")
    return torch.nn.functional.one_hot(tensor, count)


_ANSWERS: Final[dict[Any, Callable[..., Any]]] = {
    **dict.fromkeys(_READERS, _answer_number),
    torch.Tensor.tolist: _answer_list,
    torch.ctc_loss: _answer_ctc_loss,
    torch.nn.functional.ctc_loss: _answer_ctc_loss,
    torch.nn.functional.gaussian_nll_loss: _answer_gaussian_nll_loss,
    torch.nn.functional.one_hot: _answer_one_hot,
    torch.equal: _answer_equal,
    torch.Tensor.equal: _answer_equal,
    torch.Tensor.__getitem__: _answer_item,
    torch.masked_select: _answer_select,
    torch.Tensor.masked_select: _answer_select,
    torch.nonzero: _answer_nonzero,
    torch.Tensor.nonzero: _answer_nonzero,
    torch.where: _answer_where,
    torch.unique: _answer_unique,
    torch.repeat_interleave: _answer_repeat,
    torch.Tensor.repeat_interleave: _answer_repeat,
}
"""Functions that answer for functions of PyTorch, or return NotImplemented."""


# -- readings of a capture -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Reading:
    """A value that Python read in a capture."""

    node: fx.Node
    position: int
    """Position of its tensor among the outputs of the graph."""
    value: Any
    kind: str
    line: str
    """Line of code that reads the value; empty if unknown."""
    is_late: bool
    """Whether it is a test that parameters or random numbers decide, checked at the step's end."""

    @property
    def tensor(self) -> torch.Tensor:
        """The value as a tensor, which no code of the model reads."""
        return torch.as_tensor(self.value)

    @property
    def is_check(self) -> bool:
        """Whether an assertion of PyTorch reads the value."""
        return self.kind == "assertion"

    @property
    def description(self) -> str:
        """Description of the value, for display."""
        return _DESCRIPTIONS.get(self.kind, "value that is read")

    @property
    def subject(self) -> str:
        """Description with the line, for messages."""
        return f"the {self.description}" + at_line(self.line)

    def describe_change(self, value: Any) -> str:
        """Return the old and the new value as text."""
        return f"{self.subject} was {self.value} and is {value}"


def find_readings(
    name: str,
    graph_module: fx.GraphModule,
    tensors: Sequence[Any],
    values: Values,
    find_line: Callable[[Any], str],
) -> tuple[Reading, ...]:
    """Return the readings of a graph that inputs, buffers or parameters decide.

    `tensors` are the inputs of the graph, `values` the recorded values by kind. Refuses random
    numbers and parameters, except in tests for finite numbers and in assertions.
    """
    graph = graph_module.graph
    placeholders = graph.find_nodes(op="placeholder")
    trained = {
        node
        for node, tensor in zip(placeholders, tensors, strict=True)
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad
    }
    readings = []
    returned = list(graph.output_node().args[0])
    for node in graph.nodes:
        if node.target is not mark_reading:
            continue
        _, kind, index = node.args
        needed = ancestors(graph, node, only_values=True)
        frames = frames_in(node.meta.get("stack_trace"))
        line = find_line(frames)
        is_random = any(map(_is_random, needed))
        is_test = (
            kind == "assertion"
            or any(_name(n) in _FINITE_TESTS for n in needed)
            or any(path == constraints.__file__ for path, _ in frames)
        )
        is_late = not needed.isdisjoint(trained) or (is_random and is_test)
        if is_random and not is_test:
            raise CaptureError(
                f"{name}: a random number is read{at_line(line)} (an if, .item(), float(), ...), "
                "and a compiled step would always repeat the decision of the capture; turn the "
                "random choice off, or draw it outside of the step and pass it as an input"
            )
        if is_late and not is_test:
            raise CaptureError(
                f"{name}: Python{at_line(line)} reads a tensor's value (an if, .item(), float(), "
                "...) and cannot be captured: it depends on parameters; select with torch.where, "
                "or compute the value outside of the step"
            )
        if is_late or not needed.isdisjoint(placeholders):
            readings.append(
                Reading(
                    node=node,
                    position=returned.index(node),
                    value=values[kind][index],
                    kind=kind,
                    line=line,
                    is_late=is_late,
                )
            )
    return tuple(readings)


def _name(node: fx.Node) -> str:
    return getattr(node.target, "__name__", str(node.target))


def _is_random(node: fx.Node) -> bool:
    """Return whether a node draws random numbers."""
    name = _name(node).strip("_")
    return node.op != "placeholder" and (
        name in _RANDOM_FUNCTIONS or name.removesuffix("_like") in _RANDOM_FUNCTIONS
    )


_RANDOM_FUNCTIONS: Final = frozenset(
    ("bernoulli", "cauchy", "dropout", "exponential", "geometric", "log_normal", "multinomial",
     "normal", "poisson", "rand", "randint", "randn", "random", "randperm", "uniform")
)  # fmt: skip


_SHAPE_FUNCTIONS: Final = frozenset(
    ("ones_like", "zeros_like", "empty_like", "new_ones", "new_zeros", "new_empty")
)
"""Functions that read only the shape and type of their argument."""


def _is_in_place(node: fx.Node) -> bool:
    """Return whether a node changes its first argument."""
    name = _name(node)
    return node.op.startswith("call") and (
        name in _IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__"))
    )


_IN_PLACE_OPERATORS: Final = frozenset(
    ("setitem", *(f"i{n}" for n in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or",
                                    "xor", "pow")))
)  # fmt: skip


def ancestors(graph: fx.Graph, node: fx.Node, *, only_values: bool = False) -> set[fx.Node]:
    """Return a node and all that decide its value, with earlier in-place operations on any.

    With `only_values`, without tensors of which only the shape is read.
    """
    needed: set[fx.Node] = set()
    pending = [node]
    while pending:
        current = pending.pop()
        if current not in needed:
            needed.add(current)
            if not only_values or _name(current) not in _SHAPE_FUNCTIONS:
                pending += current.all_input_nodes
    storages = _storages(needed)
    for earlier in graph.nodes:
        if earlier is node:
            break
        if not _is_in_place(earlier) or earlier in needed:
            continue
        targets = earlier.all_input_nodes[:1]
        if not needed.isdisjoint(targets) or not storages.isdisjoint(_storages(targets)):
            needed |= {earlier} | ancestors(graph, earlier, only_values=only_values)
            storages = _storages(needed)
    return needed


def _storages(nodes: Iterable[fx.Node]) -> set[int]:
    """Return a key for each storage of the fake values of nodes, which views share."""
    values = tensors_in([example_value(node) for node in nodes])
    return {storage_key(value) for value in values if value.layout == torch.strided}


class ReadingCheck:
    """Computes readings of inputs and buffers before a step."""

    def __init__(self, graph_module: fx.GraphModule, readings: Sequence[Reading]) -> None:
        self._readings = [reading for reading in readings if not reading.is_late]
        source, graph = graph_module.graph, fx.Graph()
        needed: set[fx.Node] = set()
        for reading in self._readings:
            needed |= ancestors(source, reading.node)
        self._changes_inputs = any(map(_is_in_place, needed))
        copies: dict[fx.Node, fx.Node] = {}
        for node in source.nodes:
            if node.op == "placeholder" or node in needed:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        placeholders = source.find_nodes(op="placeholder")
        self.source_positions = [i for i, node in enumerate(placeholders) if node in needed]
        """Positions of the inputs of the graph that decide what is read."""
        graph.output([copies[reading.node] for reading in self._readings])
        self._module = fx.GraphModule(graph_module, graph)

    def find_change(self, tensors: Sequence[torch.Tensor]) -> str:
        """Return a text for the first reading that has changed; "" if there is none."""
        if not self._readings:
            return ""
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                inputs = [t.clone() for t in tensors] if self._changes_inputs else tensors
                values = [value.tolist() for value in self._module(*inputs)]
        except FOREIGN_ERRORS:
            reading = self._readings[0]
            where = at_line(reading.line)
            return (
                f"the {reading.description}{where} was {reading.value}, and cannot be computed now"
            )
        for reading, value in zip(self._readings, values, strict=True):
            if repr(value) != repr(reading.value):
                return reading.describe_change(value)
        return ""
