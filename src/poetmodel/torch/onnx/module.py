"""`from_onnx`: an ONNX file as a module whose weights are parameters."""

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
from poetmodel.torch.onnx import pointwise, quantized, recurrent, reductions, shapes, spatial
from poetmodel.torch.onnx.operators import (
    MAX_NUMBERS,
    OPERATORS,
    OnnxNode,
    to_numbers,
    to_tensor,
)
from poetmodel.torch.onnx.quantized import FrontRecord, split_front
from poetmodel.torch.onnx.reading import (
    FileRecord,
    InputRecord,
    NodeRecord,
    append_underscores,
    read_constant,
    read_file,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    import numpy as np

FAMILIES: Final = (pointwise, quantized, recurrent, reductions, shapes, spatial)
"""The modules that register operators."""
KNOWN_OPERATORS: Final = frozenset(("Constant", *OPERATORS))
"""Names of all operators that a file may contain."""
ENDINGS: Final = frozenset(("Softmax", "LogSoftmax", "Sigmoid"))
"""Operators at the end of a network that `logits` skips: losses that contain them are numerically
safer."""
_PASS_THROUGH: Final = frozenset(("Cast", "Identity"))
"""Operators that change neither shape nor order of elements, and may follow an ending."""
_RESHAPING: Final = frozenset(("Flatten", "Reshape", "Squeeze", "Transpose", "Unsqueeze"))
"""Operators that change only the shape or order of elements, and may follow an ending."""
_INTEGER_ELEMENTS: Final = {2, 3, 4, 5, 6, 7, 12, 13}
"""Numbers of integer types in `onnx.TensorProto.DataType`."""
_UNSIGNED_TYPES: Final = frozenset((torch.uint16, torch.uint32, torch.uint64))
"""Unsigned types for which PyTorch has no arithmetic."""
_BOOL_ELEMENTS: Final = 9
"""Number of booleans in `onnx.TensorProto.DataType`."""


def from_onnx(
    path: str | Path,
    *,
    logits: bool = False,
    train: str | Sequence[str] | None = None,
    rounding: str = ROUNDINGS[0],
    headroom: float = HEADROOM,
    batch: int | None = None,
    dims: Mapping[str, int] | None = None,
) -> OnnxModule:
    """Return the network of an ONNX file as a trainable module.

    Floating-point initializers become parameters under their names; in a file that PyTorch
    exported, these are the names of the model's parameters. Running statistics of a batch norm
    become buffers, which training mode updates as in PyTorch. Scalars, inputs that must be constant
    numbers (the scales of a Resize, for example), limits, exponents and the values that Where
    selects are not trained. Constants from Constant nodes train only if they are weights with
    different elements. Half, bfloat16 and double precision become float32, and unsigned integers of
    more than one byte become int64. Quantized layers at the beginning (QuantizeLinear,
    DequantizeLinear) become an int8 front, which is frozen except for the layers in `train`.

    Parameters
    ----------
    path : str or Path
        A file of opset 13 to 23. Input dimensions may be symbolic.
    logits : bool
        In training mode, skip a Softmax, LogSoftmax or Sigmoid at the end and return its input, for
        a loss that contains this operator. Evaluation mode returns the outputs of the file.
    train, rounding, headroom
        Names of the int8 nodes to train, and the options of their training, as for `quantized`.
    batch, dims
        Sizes of open dimensions, for `OnnxModule.example_inputs`, which describes them. A quantized
        front needs those of its input, except for the batch.

    Returns
    -------
    OnnxModule
        In training mode. It returns the floating-point outputs of the file, as a tuple if there are
        several.

    Raises
    ------
    MissingExtraError
        If the package onnx is not installed.
    InputError
        If the file cannot be read, or if it contains unknown operators (the message lists all, each
        with its first nodes) or other features that are not supported. If `logits` is set and the
        network does not end in an operator that it skips, if `train` matches no int8 layer, if
        `rounding` or `headroom` is invalid, or if the file has no dimension of a name in `dims`.

    Notes
    -----
    An initializer that several nodes use is one parameter. Weights whose elements are all equal are
    one parameter for each node: exporters store equal constants once, such as the zeros of new
    biases. Names that are taken get underscores appended.
    """
    file = read_file(path, is_known=KNOWN_OPERATORS.__contains__)
    _check_outputs(file)
    sizes = dict(dims or {})
    _check_dimension_names(str(file.path), file.inputs, sizes)
    front, record = split_front(
        file, OnnxModule, train=train, rounding=rounding, headroom=headroom, sizes=sizes
    )
    module = OnnxModule(record, logits=logits, front=front)
    module.example_batch, module.example_dims = batch, sizes
    return module


def _check_dimension_names(
    path: str, inputs: Iterable[InputRecord], sizes: Mapping[str, int]
) -> None:
    """Raise `InputError` for the first of `sizes` that is no open dimension of an input."""
    names = {d for record in inputs for d in record.shape if isinstance(d, str)}
    unknown_names = sorted(sizes.keys() - names)
    if unknown_names:
        raise InputError(
            f"{path}: it has no open dimension {unknown_names[0]!r}; it has "
            f"{', '.join(map(repr, sorted(names))) or 'none'}"
        )


@dataclass(frozen=True, slots=True)
class _Execution:
    """The execution of a node in a forward pass: the names of the node and of values."""

    node: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    deleted_values: tuple[str, ...] = ()
    """Names of the values to delete after the execution."""


@dataclass(slots=True)
class _ConstantUses:
    """Counts of the inputs that read a constant, by the purpose of the input."""

    numbers: int = 0
    """Number of inputs that must be numbers."""
    weights: int = 0
    """Number of inputs that are weights."""
    statistics: int = 0
    """Number of inputs that are running statistics."""
    is_tensor: bool = False
    """Whether an input needs a tensor that does not train."""
    other_uses: list[tuple[str, int]] = field(default_factory=list)
    """(operator, position) of each other input."""


class OnnxModule(nn.Module):  # type: ignore[misc, unused-ignore]
    """The network of an ONNX file. Create it with `from_onnx`.

    Its constants become parameters, buffers or plain numbers. With `logits`, training mode skips
    the `ending`, which must be one of `ENDINGS` and stays registered.
    """

    def __init__(
        self, record: FileRecord, *, logits: bool = False, front: FrontRecord | None = None
    ) -> None:
        super().__init__()
        self.file = str(record.path)
        """Path of the ONNX file, for messages."""
        self.inputs = record.inputs
        """Names, shapes and types of the inputs."""
        self.outputs = record.outputs
        """Names of the outputs that the module returns."""
        self.nodes = nn.ModuleDict()
        """The nodes as modules, by name."""
        self.tensor_paths: dict[str, tuple[str, ...]] = {}
        """Attribute path in this module of each parameter and buffer, by its name in the file.

        Copies of shared constants have names of their own. Tensors of `front` are left out."""
        self.plain_numbers: dict[str, Any] = {}
        """Constants as plain Python numbers, or nested tuples of them, by name."""
        self.front = None if front is None else front.front
        """The quantized first nodes of the file as one int8 module, or None."""
        self.front_values = ("", "") if front is None else (front.source, front.result)
        """Names of the front's input and of its result; empty without a front."""
        self.executions: tuple[_Execution, ...] = ()
        """The executions of the nodes, in order."""
        self.reshapes_ending = False
        """Whether a node after the ending reshapes or transposes; only valid with an `ending`."""
        self.ending: OnnxNode | None = None
        """The Softmax, LogSoftmax or Sigmoid at the end, as from `_find_ending`, or None."""
        self.logits = logits
        """Whether training mode skips the ending."""
        self.example_batch: int | None = None
        """Batch size of example inputs, unless they get another one."""
        self.example_dims: Mapping[str, int] = {}
        """Sizes of open dimensions of example inputs, unless they get others."""
        # Names of constants must differ from those of all attributes.
        record = _Constants(self, record).register_all()
        for node in record.nodes:
            self.nodes[node.name] = OnnxNode(node, opset=record.opset)
        self.executions = tuple(_plan_executions(record))
        self.ending = self._find_ending()
        if logits and self.ending is None:
            raise InputError(
                f"{record.path}: logits: the network does not end in Softmax, LogSoftmax or "
                "Sigmoid; leave logits out"
            )

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Return the floating-point output, or a tuple of several. Inputs are in file order.

        With `logits`, training mode skips the `ending`. Raises `InputError` unless the number and
        the shapes of the inputs match the file, or if a node has a feature that is not supported.
        """
        self._check_shapes(inputs)
        values: dict[str, Any] = dict(self.plain_numbers)
        names = (record.name for record in self.inputs)
        values.update(zip(names, map(_convert_unsigned, inputs), strict=True))
        if self.front is not None:
            source, result_name = self.front_values
            values[result_name] = self.front(values.pop(source))
        for name, path in self.tensor_paths.items():
            values[name] = reduce(getattr, path, self)
        skipped_node = self.ending.name if self.logits and self.training and self.ending else None
        for execution in self.executions:
            arguments = [values[name] if name else None for name in execution.inputs]
            result: Any = (
                arguments[0]
                if execution.node == skipped_node
                else self.nodes[execution.node](*arguments)
            )
            if len(execution.outputs) == 1:
                values[execution.outputs[0]] = result
            else:
                values.update(zip(execution.outputs, result, strict=False))
            for name in execution.deleted_values:
                del values[name]
        outputs = tuple(to_tensor(values[name]) for name in self.outputs)
        return outputs[0] if len(outputs) == 1 else outputs

    def example_inputs(
        self, *, batch: int | None = None, dims: Mapping[str, int] | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Return example inputs in the shapes of the file.

        Floating-point inputs are standard normal numbers, equal in each call. Integers are 0 of
        type int64, booleans are true.

        Parameters
        ----------
        batch : int, optional
            Size of each first dimension that is open in the file, and of all dimensions of the
            same name. Default: that of `from_onnx`.
        dims : mapping of str to int, optional
            Sizes of open dimensions, by name. They take precedence over `batch`, and over those of
            `from_onnx`, which they complete.

        Raises
        ------
        InputError
            If a dimension remains open, if `dims` has a name that is no open dimension of the file,
            or if `batch` is given, but no first dimension is open, or `dims` sets all first
            dimensions that are open.
        """
        batch = self.example_batch if batch is None else batch
        sizes_by_name = dict(self.example_dims) | dict(dims or {})
        _check_dimension_names(self.file, self.inputs, sizes_by_name)
        batch_names = {i.shape[0] for i in self.inputs if i.shape and isinstance(i.shape[0], str)}
        if batch is not None and not batch_names:
            sizes = ", ".join(sorted({str(i.shape[0]) for i in self.inputs if i.shape}))
            raise InputError(
                f"{self.file}: batch: the file fixes it at {sizes}; leave it out, or export the "
                "network with a dynamic first dimension"
            )
        if batch is not None and batch_names <= sizes_by_name.keys():
            open_names = ", ".join(sorted(map(repr, batch_names)))
            raise InputError(
                f"{self.file}: batch: dims already sets the size of {open_names}; leave one of "
                "them out"
            )
        if batch is not None:
            sizes_by_name = dict.fromkeys(sorted(map(str, batch_names)), batch) | sizes_by_name
        dimension_names = {d for i in self.inputs for d in i.shape if isinstance(d, str)}
        unset_names = sorted(dimension_names - sizes_by_name.keys())
        if unset_names:
            unset_text = " and ".join(
                f"{name!r} ({'--batch N' if name in batch_names else f'--dim {name}=N'})"
                for name in unset_names
            )
            raise InputError(
                f"{self.file}: the dimension {unset_text} is open; set its size, in Python with "
                "batch= and dims= of from_onnx"
            )
        generator = torch.Generator().manual_seed(0)
        return tuple(self._make_example(record, sizes_by_name, generator) for record in self.inputs)

    def _make_example(
        self,
        input_record: InputRecord,
        sizes_by_name: Mapping[str, int],
        generator: torch.Generator,
    ) -> torch.Tensor:
        """Return an example tensor of an input: integers 0, booleans true, other numbers normal.

        `sizes_by_name` has the sizes of open dimensions.
        """
        shape = [
            sizes_by_name[size] if isinstance(size, str) else size for size in input_record.shape
        ]
        if input_record.element_type in _INTEGER_ELEMENTS:
            return torch.zeros(shape, dtype=torch.int64)
        if input_record.element_type == _BOOL_ELEMENTS:
            return torch.ones(shape, dtype=torch.bool)
        return torch.randn(shape, generator=generator)

    def _check_shapes(self, inputs: tuple[torch.Tensor, ...]) -> None:
        """Raise `InputError` unless the number and the shapes of the inputs match the file.

        An open dimension matches any size; a front has been built for the sizes of `from_onnx`.
        """
        fixed_sizes = {} if self.front is None else self.example_dims
        if len(inputs) != len(self.inputs):
            names = ", ".join(repr(record.name) for record in self.inputs)
            raise InputError(f"{self.file}: expected the inputs {names}, got {len(inputs)} tensors")
        for record, value in zip(self.inputs, inputs, strict=True):
            shape = [
                *record.shape[:1],
                *(fixed_sizes.get(str(size), size) for size in record.shape[1:]),
            ]
            is_match = len(shape) == value.ndim and all(
                isinstance(size, str) or size == actual
                for size, actual in zip(shape, value.shape, strict=True)
            )
            if not is_match:
                raise InputError(
                    f"{self.file}: input {record.name!r}: expected the shape "
                    f"({', '.join(map(str, shape))}), got ({', '.join(map(str, value.shape))})"
                )

    def _find_ending(self) -> OnnxNode | None:
        """Return the node of `ENDINGS` that computes the only output, or None.

        Sets `reshapes_ending` if nodes after it change the shape or order of elements.
        """
        if len(self.outputs) != 1:
            return None
        (name,) = self.outputs
        producers = {
            name: execution for execution in self.executions for name in execution.outputs if name
        }
        reads = Counter(name for execution in self.executions for name in execution.inputs)
        reads[name] += 1
        while name in producers and reads[name] == 1:
            node: OnnxNode = self.nodes[producers[name].node]
            if node.operator not in _PASS_THROUGH | _RESHAPING:
                return node if node.operator in ENDINGS else None
            self.reshapes_ending = self.reshapes_ending or node.operator in _RESHAPING
            name = producers[name].inputs[0]
        return None


def _convert_unsigned(x: torch.Tensor) -> torch.Tensor:
    """Return unsigned integers of more than one byte as int64, other tensors unchanged."""
    return x.to(torch.int64) if x.dtype in _UNSIGNED_TYPES else x


def _check_outputs(record: FileRecord) -> None:
    """Raise `InputError` if a `first_output_only` operator has another output that is read."""
    read_names = {name for node in record.nodes for name in node.inputs} | set(record.outputs)
    for node in record.nodes:
        outputs = [repr(name) for name in node.outputs[1:] if name and name in read_names]
        operator = OPERATORS.get(node.operator)
        if operator is not None and operator.first_output_only and outputs:
            raise InputError(
                f"{record.path}: node {node.name!r} ({node.operator}): its output {outputs[0]} is "
                "read, which is not supported; export the network without it"
            )


def _plan_executions(record: FileRecord) -> Iterator[_Execution]:
    """Yield the executions of the nodes in order, each with the values to delete after it."""
    last_reader = {
        name: index for index, node in enumerate(record.nodes) for name in node.inputs if name
    }
    for index, node in enumerate(record.nodes):
        unused_names = tuple(
            name
            for name in dict.fromkeys(filter(None, node.inputs))
            if last_reader[name] == index and name not in record.outputs
        )
        yield _Execution(node.name, node.inputs, node.outputs, unused_names)


class _Constants:
    """Finds the constants of a file, and registers them in a module (`register_all`)."""

    def __init__(self, module: OnnxModule, record: FileRecord) -> None:
        self.module = module
        self.record = record
        self.arrays = dict(record.initializers)
        """Constants by name."""
        self.initializer_names = set(self.arrays)
        """Names of constants that are initializers or copies of them; all further ones come from
        Constant nodes."""
        self.value_names = {*self.arrays, *(value.name for value in record.inputs)}
        """Names of all values: constants, inputs, inputs and outputs of nodes, and copies."""
        for node in record.nodes:
            self.value_names.update(node.inputs, node.outputs)
        self.uses: dict[str, _ConstantUses] = {}
        """Uses of each constant that a node reads, by name."""

    def register_all(self) -> FileRecord:
        """Register constants that are read or outputs; return the record without Constant nodes.

        Identities of constants are removed, too, and renamed outputs are set in the module.
        """
        nodes = [node for node in self.record.nodes if not self._add_constant_node(node)]
        source_names: dict[str, str] = {}
        nodes = [node for node in nodes if not self._resolve_alias(node, source_names)]
        nodes = [
            replace(node, inputs=tuple(source_names.get(name, name) for name in node.inputs))
            for node in nodes
        ]
        self._count_uses(nodes)
        # In reverse, so that the first node in the file reads the constant itself.
        nodes = [self._copy_shared_constants(node) for node in reversed(nodes)][::-1]
        self.uses.clear()
        self._count_uses(nodes)
        outputs = tuple(source_names.get(name, name) for name in self.record.outputs)
        for name in dict.fromkeys((*self.uses, *outputs)):
            if name in self.arrays:
                self._add_constant(name, self.arrays[name], self.uses.get(name, _ConstantUses()))
        self.module.outputs = outputs
        return replace(self.record, nodes=tuple(nodes), outputs=outputs)

    def _add_constant_node(self, node: NodeRecord) -> bool:
        """Add the value of a Constant node to `arrays`; return whether the node is a Constant."""
        if node.operator != "Constant":
            return False
        self.arrays[node.outputs[0]] = read_constant(node, self.record.path)
        return True

    def _resolve_alias(self, node: NodeRecord, source_names: dict[str, str]) -> bool:
        """Map the result of an Identity to its constant, if it has one, in `source_names`.

        Return whether it has one. The result of a uniform initializer becomes an initializer of its
        own instead, so that both can train.
        """
        if node.operator != "Identity":
            return False
        source = source_names.get(node.inputs[0], node.inputs[0])
        if source not in self.arrays:
            return False
        (name,) = node.outputs
        if _is_uniform(self.arrays[source]) and source in self.initializer_names:
            self.arrays[name] = self.arrays[source]
            self.initializer_names.add(name)
        else:
            source_names[name] = source
        return True

    def _count_uses(self, nodes: list[NodeRecord]) -> None:
        """Count the inputs that read constants in `uses`, by constant and purpose."""
        for node in nodes:
            operator = OPERATORS[node.operator]
            for position, name in enumerate(node.inputs):
                if name not in self.arrays:
                    continue
                use = self.uses.setdefault(name, _ConstantUses())
                if position in operator.numbers:
                    use.numbers += 1
                elif position in operator.statistics:
                    use.statistics += 1
                elif position in operator.tensors:
                    use.is_tensor = True
                elif position in operator.weights:
                    use.weights += 1
                else:
                    use.other_uses.append((node.operator, position))

    def _copy_shared_constants(self, node: NodeRecord) -> NodeRecord:
        """Return a node that reads new copies, in `arrays`, of constants shared by chance.

        Statistics and uniform weights, such as zeros of new biases: exporters store equal constants
        once. Each copy reduces `uses`; the last remaining reader gets none. Also of a tensor that
        another input may read as numbers.
        """
        operator = OPERATORS[node.operator]
        inputs = list(node.inputs)
        for position, name in enumerate(inputs):
            use = self.uses.get(name)
            if use is None:
                continue
            is_mixed = position in operator.tensors and bool(use.other_uses)
            needs_copy = position in operator.statistics or (
                position in operator.weights and _is_uniform(self.arrays[name])
            )
            if is_mixed or (needs_copy and use.weights + use.statistics > 1):
                copy_name = append_underscores(
                    f"{name}_{use.weights + use.statistics}", self.value_names.__contains__
                )
                self.value_names.add(copy_name)
                self.arrays[copy_name] = self.arrays[name].copy()
                if name in self.initializer_names:
                    self.initializer_names.add(copy_name)
                inputs[position] = copy_name
                if position in operator.statistics:
                    use.statistics -= 1
                elif position in operator.weights:
                    use.weights -= 1
        return replace(node, inputs=tuple(inputs))

    def _add_constant(self, name: str, value: np.ndarray, use: _ConstantUses) -> None:
        """Register a constant as a parameter or buffer of the module, or as plain numbers.

        Floating running statistics, and what must stay a tensor, become a buffer, a floating
        constant that trains a parameter. Any other becomes numbers if an input must be numbers or
        it has at most `MAX_NUMBERS` elements, else a buffer.
        """
        is_floating = value.dtype.kind == "f"
        if use.is_tensor or (is_floating and use.statistics):
            self._register_tensor(name, torch.from_numpy(value.copy()), is_trained=False)
        elif is_floating and value.ndim and self._is_trained(name, use):
            self._register_tensor(name, torch.from_numpy(value.copy()), is_trained=True)
        elif use.numbers or value.size <= MAX_NUMBERS:
            self.module.plain_numbers[name] = to_numbers(value)
        else:
            self._register_tensor(name, torch.from_numpy(value.copy()), is_trained=False)

    def _is_trained(self, name: str, use: _ConstantUses) -> bool:
        """Return whether a constant trains: a weight, and if of a Constant node, not uniform."""
        if name not in self.initializer_names:
            return bool(use.weights) and not _is_uniform(self.arrays[name])
        return bool(use.weights) or not _NON_WEIGHTS.issuperset(use.other_uses)

    def _register_tensor(self, name: str, value: torch.Tensor, *, is_trained: bool) -> None:
        """Register a tensor at its dotted name (underscores if taken), also in `tensor_paths`."""
        *prefixes, leaf_name = [prefix for prefix in name.split(".") if prefix] or ["weight"]
        module: nn.Module = self.module
        path = []
        for prefix in prefixes:
            prefix = _make_unique_name(module, prefix, is_prefix=True)  # noqa: PLW2901
            if prefix not in module._modules:  # noqa: SLF001
                module.add_module(prefix, _Prefix())
            module = module._modules[prefix]  # noqa: SLF001
            path.append(prefix)
        leaf_name = _make_unique_name(module, leaf_name, is_prefix=False)
        if is_trained:
            module.register_parameter(leaf_name, nn.Parameter(value))
        else:
            module.register_buffer(leaf_name, value)
        self.module.tensor_paths[name] = (*path, leaf_name)


_NON_WEIGHTS: Final = frozenset(
    (("Clip", 1), ("Clip", 2), ("Pow", 1), ("Where", 1), ("Where", 2), ("CastLike", 1))
)
"""(operator, position) of floating-point inputs that are not weights."""


class _Prefix(nn.Module):  # type: ignore[misc, unused-ignore]
    """Container of the parameters and buffers whose names have a common prefix."""


def _make_unique_name(module: nn.Module, name: str, *, is_prefix: bool) -> str:
    """Return a name with underscores appended until it is no attribute of a module.

    If `is_prefix`, an existing `_Prefix` of this name is also accepted.
    """

    def is_taken(name: str) -> bool:
        is_existing_prefix = is_prefix and isinstance(getattr(module, name, None), _Prefix)
        return hasattr(module, name) and not is_existing_prefix

    return append_underscores(name, is_taken)


def _is_uniform(value: np.ndarray) -> bool:
    """Return whether an array is floating-point, not empty, and all elements are equal."""
    return bool(value.dtype.kind == "f" and value.size and (value == value.flat[0]).all())
