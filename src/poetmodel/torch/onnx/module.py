"""``from_onnx``: an ONNX file as a module whose weights are parameters."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from poetmodel.errors import InputError
from poetmodel.torch.int8.quantizing import HEADROOM
from poetmodel.torch.int8.training import ROUNDINGS
from poetmodel.torch.onnx import pointwise, recurrent, reductions, shapes, spatial
from poetmodel.torch.onnx.operators import (
    MOST_NUMBERS,
    OPERATORS,
    OnnxNode,
    plain,
    tensor,
)
from poetmodel.torch.onnx.quantized import QUANTIZING, FrontRecord, split
from poetmodel.torch.onnx.reading import FileRecord, InputRecord, NodeRecord, array_of, read_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import numpy as np

FAMILIES: Final = (pointwise, recurrent, reductions, shapes, spatial)
"""The modules that register operators."""
KNOWN: Final = frozenset(("Constant", *OPERATORS, *QUANTIZING))
"""The operators that a file can have."""
ENDINGS: Final = frozenset(("Softmax", "LogSoftmax", "Sigmoid"))
"""Operators whose input a loss takes better than their output."""
_SAME: Final = frozenset(("Cast", "Identity"))
_MOVED: Final = frozenset(("Flatten", "Reshape", "Squeeze", "Transpose", "Unsqueeze"))
"""Operators that leave the elements as they are, and can stand behind an ending."""
_INTEGERS: Final = {2, 3, 4, 5, 6, 7, 12, 13}
_UNSIGNED: Final = frozenset((torch.uint16, torch.uint32, torch.uint64))
"""Types that PyTorch has no arithmetic of."""
_TRUTH: Final = 9


def from_onnx(
    path: str | Path,
    *,
    logits: bool = False,
    train: str | Sequence[str] | None = None,
    rounding: str = ROUNDINGS[0],
    headroom: float = HEADROOM,
) -> OnnxModule:
    """Return the network of an ONNX file as a module that trains.

    Floating initializers are parameters, under their names: those of a model that PyTorch exported
    are the names of its parameters. Running statistics of a batch norm are buffers, which
    ``train()`` updates as PyTorch does. Scalars, limits, exponents and constants that are written
    into the code are not trained. Half and double precision become float32, and
    unsigned numbers of more than a byte int64. What is quantized at
    the beginning (QuantizeLinear, DequantizeLinear) is a front in int8, and frozen but for the
    layers of `train`.

    Parameters
    ----------
    path : str or Path
        A file of opset 13 to 23. Dimensions of inputs may be symbolic.
    logits : bool
        In training mode leave a Softmax, LogSoftmax or Sigmoid at the end to the loss: the module
        then returns its input. In evaluation mode it returns what the file says.
    train, rounding, headroom
        The int8 layers that train, by the names of their nodes, and how: as for `quantized`.

    Returns
    -------
    OnnxModule
        In training mode. It returns the floating outputs of the file, a tuple if there are several.

    Raises
    ------
    MissingExtraError
        If the package onnx is not installed.
    InputError
        If the file cannot be read, or has operators that are not known: names all, and their nodes.
        If `train` matches no layer in int8.

    Notes
    -----
    An initializer that several nodes use is one parameter, unless all its elements are equal:
    exporters let what happens to be equal, such as the zeros of new biases, share one.
    """
    file = read_file(path, is_known=KNOWN.__contains__)
    front, record = split(file, train=train, rounding=rounding, headroom=headroom)
    return OnnxModule(record, logits=logits, front=front)


@dataclass(frozen=True, slots=True)
class _Step:
    """A node, where its inputs are, and which values nothing reads after it."""

    node: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    done: tuple[str, ...] = ()


@dataclass(slots=True)
class _Use:
    """Uses of a constant by the nodes of a file."""

    numbers: int = 0
    weights: int = 0
    statistics: int = 0
    others: list[tuple[str, int]] = field(default_factory=list)


class OnnxModule(nn.Module):  # type: ignore[misc, unused-ignore]
    """The network of an ONNX file. `from_onnx` makes it."""

    def __init__(
        self, record: FileRecord, *, logits: bool = False, front: FrontRecord | None = None
    ) -> None:
        super().__init__()
        self.file = str(record.path)
        """Where it comes from."""
        self.given = record.inputs
        """The inputs of the file."""
        self.outputs = record.outputs
        """Names of the outputs that the module returns."""
        self.nodes = nn.ModuleDict()
        self.held: dict[str, tuple[str, ...]] = {}
        """Where the tensors are that the file holds, by name."""
        self.numbers: dict[str, Any] = {}
        """Constants that are no tensors, by name."""
        self.front = None if front is None else front.front
        """What the file has quantized: its first nodes, up to one value."""
        self.ends = ("", "") if front is None else (front.reads, front.makes)
        """The input that the front takes, and the value that it makes."""
        self.steps: tuple[_Step, ...] = ()
        record = _Constants(self, record).placed()
        _check_outputs(record)
        for node in record.nodes:
            self.nodes[node.name] = OnnxNode(node, opset=record.opset)
        self.steps = tuple(_steps(record))
        self.moved = False
        """Whether the output has another shape than the ending gave it."""
        self.ending: OnnxNode | None = self._ending()
        """The Softmax, LogSoftmax or Sigmoid that makes the only output."""
        if logits and self.ending is None:
            raise InputError(
                f"{record.path}: logits: it ends in no Softmax, LogSoftmax or Sigmoid that could "
                "be left to the loss; leave logits out"
            )
        self.logits = logits
        """Whether the ending is left to the loss in training mode."""

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Return the floating outputs for the inputs of the file, in its order."""
        self._check(inputs)
        values: dict[str, Any] = dict(self.numbers)
        names = (given.name for given in self.given)
        values.update(zip(names, map(_signed, inputs), strict=True))
        if self.front is not None:
            reads, makes = self.ends
            values[makes] = self.front(values.pop(reads))
        for name, path in self.held.items():
            values[name] = reduce(getattr, path, self)
        skipped = self.ending.name if self.logits and self.training and self.ending else None
        for step in self.steps:
            arguments = [values[name] if name else None for name in step.inputs]
            result: Any = (
                arguments[0] if step.node == skipped else self.nodes[step.node](*arguments)
            )
            if len(step.outputs) == 1:
                values[step.outputs[0]] = result
            else:
                values.update(zip(step.outputs, result, strict=False))
            for name in step.done:
                del values[name]
        outputs = tuple(tensor(values[name]) for name in self.outputs)
        return outputs[0] if len(outputs) == 1 else outputs

    def example_inputs(
        self, *, batch: int | None = None, dims: Mapping[str, int] | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Return inputs of the right shapes: random numbers, zeros for whole ones.

        Parameters
        ----------
        batch : int, optional
            What the first dimension of the inputs is, where the file leaves it open.
        dims : mapping of str to int, optional
            Other dimensions that the file leaves open, by name.

        Raises
        ------
        InputError
            If a dimension is open still, is fixed, or is not there: names it.
        """
        chosen = dict(dims or {})
        first = {i.shape[0] for i in self.given if i.shape and isinstance(i.shape[0], str)}
        if batch is not None and not first:
            sizes = ", ".join(sorted({str(i.shape[0]) for i in self.given if i.shape}))
            raise InputError(
                f"{self.file}: batch: the file fixes it at {sizes}; leave it out, or export the "
                "network with a dynamic first dimension"
            )
        if batch is not None and first <= chosen.keys():
            open_ = ", ".join(sorted(map(repr, first)))
            raise InputError(
                f"{self.file}: batch: dims says already how large {open_} is; leave one of them out"
            )
        if batch is not None:
            chosen = dict.fromkeys(sorted(map(str, first)), batch) | chosen
        names = {d for i in self.given for d in i.shape if isinstance(d, str)}
        unknown, missing = sorted(chosen.keys() - names), sorted(names - chosen.keys())
        if unknown:
            raise InputError(
                f"{self.file}: it has no open dimension {unknown[0]!r}; it has "
                f"{', '.join(map(repr, sorted(names))) or 'none'}"
            )
        if missing:
            unset = " and ".join(
                f"{name!r} ({'--batch N' if name in first else f'--dim {name}=N'})"
                for name in missing
            )
            raise InputError(
                f"{self.file}: the dimension {unset} is open; say how large it is, in Python by "
                "batch= and dims="
            )
        draw = torch.Generator().manual_seed(0)
        return tuple(self._example(given, chosen, draw) for given in self.given)

    def _example(
        self, given: InputRecord, chosen: Mapping[str, int], draw: torch.Generator
    ) -> torch.Tensor:
        shape = [chosen[size] if isinstance(size, str) else size for size in given.shape]
        if given.elements in _INTEGERS:
            return torch.zeros(shape, dtype=torch.int64)
        if given.elements == _TRUTH:
            return torch.ones(shape, dtype=torch.bool)
        return torch.randn(shape, generator=draw)

    def _check(self, inputs: tuple[torch.Tensor, ...]) -> None:
        """Raise unless inputs have the shapes of the file."""
        if len(inputs) != len(self.given):
            names = ", ".join(repr(given.name) for given in self.given)
            raise InputError(f"{self.file}: expected its inputs {names}, got {len(inputs)}")
        for given, value in zip(self.given, inputs, strict=True):
            shape = given.shape
            fixed = len(shape) == value.ndim and all(
                isinstance(size, str) or size == actual
                for size, actual in zip(shape, value.shape, strict=True)
            )
            if not fixed:
                raise InputError(
                    f"{self.file}: input {given.name!r}: expected the shape "
                    f"({', '.join(map(str, shape))}), got ({', '.join(map(str, value.shape))})"
                )

    def _ending(self) -> OnnxNode | None:
        if len(self.outputs) != 1:
            return None
        (name,) = self.outputs
        makers = {name: step for step in self.steps for name in step.outputs if name}
        reads = Counter(name for step in self.steps for name in step.inputs)
        reads[name] += 1
        while name in makers and reads[name] == 1:
            node: OnnxNode = self.nodes[makers[name].node]
            if node.operator not in _SAME | _MOVED:
                return node if node.operator in ENDINGS else None
            self.moved = self.moved or node.operator in _MOVED
            name = makers[name].inputs[0]
        return None


def _signed(x: torch.Tensor) -> torch.Tensor:
    """Return unsigned numbers of more than a byte in int64; other tensors as they are."""
    return x.to(torch.int64) if x.dtype in _UNSIGNED else x


def _check_outputs(record: FileRecord) -> None:
    """Raise if something reads a further output of an operator that makes its first one alone."""
    read = {name for node in record.nodes for name in node.inputs} | set(record.outputs)
    for node in record.nodes:
        more = [repr(name) for name in node.outputs[1:] if name and name in read]
        if OPERATORS[node.operator].first_output_only and more:
            raise InputError(
                f"{record.path}: node {node.name!r} ({node.operator}): its output {more[0]} is "
                "read, which is not known; export the network without it"
            )


def _steps(record: FileRecord) -> Iterator[_Step]:
    """Yield what is run, with the values that nothing reads any more."""
    last = {name: k for k, node in enumerate(record.nodes) for name in node.inputs if name}
    for k, node in enumerate(record.nodes):
        done = tuple(
            name
            for name in dict.fromkeys(filter(None, node.inputs))
            if last[name] == k and name not in record.outputs
        )
        yield _Step(node.name, node.inputs, node.outputs, done)


class _Constants:
    """Where the initializers and constants of a file go: parameters, buffers, numbers."""

    def __init__(self, module: OnnxModule, record: FileRecord) -> None:
        self.module = module
        self.record = record
        self.arrays = dict(record.initializers)
        self.written = set(self.arrays)
        """Constants that are initializers, not written into the code."""
        self.uses: dict[str, _Use] = {}

    def placed(self) -> FileRecord:
        """Register all constants, and return the file without the nodes that make them."""
        nodes = [node for node in self.record.nodes if not self._take_constant(node)]
        renamed: dict[str, str] = {}
        nodes = [node for node in nodes if not self._is_alias(node, renamed)]
        nodes = [
            replace(node, inputs=tuple(renamed.get(name, name) for name in node.inputs))
            for node in nodes
        ]
        self._count(nodes)
        nodes = [self._apart(node) for node in reversed(nodes)][::-1]
        self.uses.clear()
        self._count(nodes)
        outputs = tuple(renamed.get(name, name) for name in self.record.outputs)
        for name in dict.fromkeys((*self.uses, *outputs)):
            if name in self.arrays:
                self._place(name, self.arrays[name], self.uses.get(name, _Use()))
        self.module.outputs = outputs
        return replace(self.record, nodes=tuple(nodes), outputs=outputs)

    def _take_constant(self, node: NodeRecord) -> bool:
        """Take the value of a Constant node; return whether it was one."""
        if node.operator != "Constant":
            return False
        import numpy as np

        ((key, value),) = node.attributes.items()
        if key == "value":
            array = array_of(value, self.record.path)
        elif key in ("value_float", "value_floats", "value_int", "value_ints"):
            array = np.asarray(value, np.float32 if "float" in key else np.int64)
        else:
            raise InputError(
                f"{self.record.path}: node {node.name!r} (Constant): {key} is not known; expected "
                "numbers"
            )
        self.arrays[node.outputs[0]] = array
        return True

    def _is_alias(self, node: NodeRecord, renamed: dict[str, str]) -> bool:
        """Resolve another name of a constant; return whether a node was one."""
        if node.operator != "Identity":
            return False
        source = renamed.get(node.inputs[0], node.inputs[0])
        if source not in self.arrays:
            return False
        (name,) = node.outputs
        if _is_uniform(self.arrays[source]) and source in self.written:
            self.arrays[name] = self.arrays[source]
            self.written.add(name)
        else:
            renamed[name] = source
        return True

    def _count(self, nodes: list[NodeRecord]) -> None:
        for node in nodes:
            kind = OPERATORS[node.operator]
            for position, name in enumerate(node.inputs):
                if name not in self.arrays:
                    continue
                use = self.uses.setdefault(name, _Use())
                if position in kind.numbers:
                    use.numbers += 1
                elif position in kind.statistics:
                    use.statistics += 1
                elif position in kind.weights:
                    use.weights += 1
                else:
                    use.others.append((node.operator, position))

    def _apart(self, node: NodeRecord) -> NodeRecord:
        """Give a node constants of its own where it shares them by chance.

        Each batch norm has its own statistics, and weights that are equal throughout are equal by
        chance.
        """
        kind = OPERATORS[node.operator]
        inputs = list(node.inputs)
        for position, name in enumerate(inputs):
            own = position in kind.statistics or (
                position in kind.weights and name in self.arrays and _is_uniform(self.arrays[name])
            )
            use = self.uses.get(name)
            if not own or use is None:
                continue
            if use.weights + use.statistics > 1:
                again = f"{name}_{use.weights + use.statistics}"
                self.arrays[again] = self.arrays[name].copy()
                if name in self.written:
                    self.written.add(again)
                inputs[position] = again
                if position in kind.statistics:
                    use.statistics -= 1
                else:
                    use.weights -= 1
        return replace(node, inputs=tuple(inputs))

    def _place(self, name: str, value: np.ndarray, use: _Use) -> None:
        """Make a constant a parameter, a buffer, or numbers."""
        floating = value.dtype.kind == "f"
        if floating and use.statistics:
            self._register(name, torch.from_numpy(value.copy()), trained=False)
        elif floating and value.ndim and self._is_weight(name, use):
            self._register(name, torch.from_numpy(value.copy()), trained=True)
        elif use.numbers or value.size <= MOST_NUMBERS:
            self.module.numbers[name] = plain(value)
        else:
            self._register(name, torch.from_numpy(value.copy()), trained=False)

    def _is_weight(self, name: str, use: _Use) -> bool:
        """Whether a constant is trained: it is used where a weight can stand.

        One that is written into the code is a weight only where nothing else stands.
        """
        if name not in self.written:
            return bool(use.weights) and not _is_uniform(self.arrays[name])
        return bool(use.weights) or not _SETTINGS.issuperset(use.others)

    def _register(self, name: str, value: torch.Tensor, *, trained: bool) -> None:
        """Keep a tensor under its name, each part of which is a module."""
        *parts, last = [part for part in name.split(".") if part] or ["weight"]
        module: nn.Module = self.module
        path = []
        for part in parts:
            part = _free(module, part, inner=True)  # noqa: PLW2901
            if part not in module._modules:  # noqa: SLF001
                module.add_module(part, _Names())
            module = module._modules[part]  # noqa: SLF001
            path.append(part)
        last = _free(module, last, inner=False)
        if trained:
            module.register_parameter(last, nn.Parameter(value))
        else:
            module.register_buffer(last, value)
        self.module.held[name] = (*path, last)


_SETTINGS: Final = frozenset(
    (("Clip", 1), ("Clip", 2), ("Pow", 1), ("Where", 1), ("Where", 2), ("CastLike", 1))
)
"""Inputs of operators that are floating, and no weights."""


class _Names(nn.Module):  # type: ignore[misc, unused-ignore]
    """Holds the parameters whose names begin alike."""


def _free(module: nn.Module, name: str, *, inner: bool) -> str:
    """Return a name that a module has free, or one that is a holder of names."""
    while hasattr(module, name) and not (inner and isinstance(getattr(module, name), _Names)):
        name += "_"
    return name


def _is_uniform(value: np.ndarray) -> bool:
    """Whether several floating elements are all equal."""
    return bool(value.dtype.kind == "f" and value.size and (value == value.flat[0]).all())
