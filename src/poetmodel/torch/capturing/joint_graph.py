"""A captured training step: its joint graph with inputs, outputs and guards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from poetmodel.errors import join_names
from poetmodel.torch.capturing.front_private import descriptors
from poetmodel.torch.capturing.inputs import Nesting, flatten, input_names, unflatten
from poetmodel.torch.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import fx

    from poetmodel.torch.capturing.captures import StepCaptures
    from poetmodel.torch.capturing.inputs import Inputs, OutputStructure
    from poetmodel.torch.capturing.process_state import ProcessState
    from poetmodel.torch.capturing.values import ValueGuards

BODY: Final = "model"
"""Name of the user's module in the captured module."""

ANNOTATION: Final = "poetmodel.module"
"""Key under a node's ``custom`` annotations: path of the module in which the node was recorded."""

LOCATION: Final = "poetmodel.place"
"""Key under a node's ``custom`` annotations: the module and, if known, the line, as text."""


def format_path(path: str) -> str:
    """Return a path relative to the user's module, for display: "" for the module itself."""
    return path.removeprefix(BODY).lstrip(".")


def location_suffix(node: fx.Node) -> str:
    """Return " in MODULE at LINE" of a node for messages; "" if the module is unknown."""
    notes = node.meta.get("custom") or {}
    path = format_path(notes.get(ANNOTATION, ""))
    location = notes.get(LOCATION) or (f"module {path!r}" if path else "")
    return f" in {location}" if location else ""


class InputKind(StrEnum):
    """Kind of a graph input; the first three and constants are named as in `torch.export`."""

    PARAMETER = "parameter"
    """A parameter of the module or of the loss."""
    BUFFER = "buffer"
    USER_INPUT = "input"
    """An input of the step, which the caller passes."""
    TANGENT = "tangent"
    """The gradient that starts the backward pass, with the shape of the loss."""
    CONSTANT_TENSOR = "constant"
    """A tensor that the module's code refers to, but no parameter, buffer or input."""
    MOMENT = "moment"
    """A state tensor of an optimizer for a parameter, or state that only an exported step has, such
    as a gradient sum."""
    LEARNING_RATE = "learning rate"
    """The learning rate of a parameter group when the step begins."""


class OutputKind(StrEnum):
    """Kind of a graph output."""

    LOSS = "loss"
    CHECK = "check"
    """Whether all tests of the model for finite numbers pass."""
    OUTPUT = "output"
    """A further output of the model; returned at the end of the step, detached."""
    STORED = "stored tensor"
    """A tensor that forward stores in an attribute, a dict or a global; detached."""
    GRADIENT = "gradient"
    """The gradient of a graph input; accumulated into ``.grad`` of its tensor."""
    MUTATION = "mutation"
    """The new value of a graph input that forward changes, such as a buffer; copied into its tensor
    at the end of the step."""


class OptimizerValue(Protocol):
    """An optimizer's value that a step reads, such as a moment."""

    def value(self) -> torch.Tensor:
        """Return the current value, or the initial value of state that does not exist yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """An input of the graph: a value that exists before the step and throughout it.

    Constants are included, although the graph reads them by ``get_attr``.
    """

    kind: InputKind
    node: fx.Node
    """The placeholder, or the ``get_attr`` node of a constant."""
    target: str
    """Path of a parameter or buffer in the captured module, such as ``model.conv1.weight``; of a
    constant its attribute in the graph module; empty for other kinds."""
    name: str
    """Name for display: of a captured parameter, buffer or constant its `target` relative to the
    user's module, of an input as in `input_names`; otherwise the kind, or the name of the
    optimizer's value."""
    position: int = 0
    """Position of a user input among the flat inputs; otherwise 0."""
    optimizer_value: OptimizerValue | None = None
    """Source of a moment or learning rate; None for other kinds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSpec:
    """An output of the graph: a result of the step."""

    kind: OutputKind
    node: fx.Node
    """The node that computes the value; may be a view, or the placeholder of an input."""
    target: InputSpec | None
    """The input that a gradient or new value belongs to; None for other kinds."""
    path: str = ""
    """Path of an output in the model's return value; otherwise empty."""

    @property
    def name(self) -> str:
        """Description for users: ``loss``, ``output logits``, ``gradient of conv1.weight``."""
        if self.target is None:
            return f"{self.kind} {self.path}".strip()
        return f"{self.kind} of {self.target.name}"


class Lookup:
    """Finds the current tensors at fixed paths in a module, such as ``layers.0.weight``."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._tensors = [path.rpartition(".")[::2] for path in paths]
        """(path of the module, name in it) of each tensor."""
        split_owners = [owner.split(".") for owner, _ in self._tensors if owner]
        owners = (
            ".".join(names[: depth + 1]) for names in split_owners for depth in range(len(names))
        )
        self._modules = [(path, *path.rpartition(".")[::2]) for path in dict.fromkeys(owners)]
        """(path, path of its parent, name in the parent) of each module on the paths."""

    def __call__(self, module: torch.nn.Module) -> list[torch.Tensor]:
        """Return the current tensors, or None; raises `AttributeError` if a path is gone."""
        modules = {"": module}
        for path, owner, name in self._modules:
            child = modules[owner].__dict__["_modules"].get(name)
            modules[path] = getattr(modules[owner], name) if child is None else child
        return [_get_tensor(modules[owner], name) for owner, name in self._tensors]


def _get_tensor(module: torch.nn.Module, name: str) -> Any:
    """Return a module's attribute like `getattr`, ten times faster for parameters and buffers."""
    attributes = module.__dict__
    tensor = attributes["_parameters"].get(name)
    if tensor is None:
        tensor = attributes["_buffers"].get(name)
    return getattr(module, name) if tensor is None else tensor


@dataclass(frozen=True, kw_only=True)
class Joint:
    """A captured step: the joint graph of forward, loss and backward, its inputs and outputs."""

    name: str
    """Name of the step in messages."""
    module: torch.nn.Module
    """The captured module: applies the user's module, at `BODY`, and the loss to flat inputs."""
    graph_module: fx.GraphModule
    """Forward, loss, backward and, with `optimizer`, updates; functional: no operation changes a
    tensor in place."""
    arguments: tuple[InputSpec, ...]
    """Graph inputs: captured placeholders in order, captured constants, then inputs that later
    changes of the graph add, such as values of an optimizer."""
    results: tuple[OutputSpec, ...]
    """Graph outputs in order; absent gradients are omitted. With `optimizer`, only the loss and
    other outputs of the model."""
    input_spec: Any
    """Nesting of the inputs (``torch.utils._pytree.TreeSpec``)."""
    inputs: tuple[Any, ...]
    """The flat inputs of the capture."""
    value_guards: ValueGuards
    """Guards of values of inputs and buffers that the model's Python code read."""
    process_state: ProcessState
    """Environment, hooks of all modules and flags of PyTorch at the capture."""
    captures: StepCaptures
    """The front with the captures of this graph."""
    output: OutputStructure | None = None
    """Structure of the model's output if inputs are named; None if the step returns the loss."""
    accumulate: int = 1
    """Number by which the loss is divided for the backward pass, but not in the output."""
    finite_check_lines: tuple[str, ...] = ()
    """Lines that test whether numbers are finite or in range, or a matrix is invertible. If a test
    fails, the step raises `CaptureError`; without ``rollback``, gradients may have been added."""
    optimizer: torch.optim.Optimizer | None = None
    """Optimizer whose updates are part of the step; None for a step that ends with the
    gradients."""
    clip_grad_norm: float | None = None
    """Upper bound on the total norm of all gradients; None if they are not clipped."""
    python_guards: Callable[[], Iterable[str]] = tuple
    """Further guards of Python values: returns a text for each that has changed."""

    @property
    def reads(self) -> tuple[Any, ...]:
        """Values that Python code or an operator read of inputs and buffers, with their lines."""
        return (*self.captures.readings, *self.value_guards.reads)

    @cached_property
    def module_arguments(self) -> tuple[InputSpec, ...]:
        """The arguments that are parameters and buffers of the module, in order."""
        kinds = (InputKind.PARAMETER, InputKind.BUFFER)
        return tuple(argument for argument in self.arguments if argument.kind in kinds)

    @cached_property
    def _input_nesting(self) -> Nesting:
        return Nesting(self.input_spec)

    @cached_property
    def _lookup(self) -> Lookup:
        return Lookup([argument.target for argument in self.module_arguments])

    @cached_property
    def _graph_positions(self) -> tuple[list[int | None], Lookup]:
        paths = [argument.target for argument in self.module_arguments]
        positions = self.captures.positions
        other_paths = [path for path in paths if path not in positions]
        return [positions.get(path) for path in paths], Lookup(other_paths)

    def module_tensors(
        self, graph_tensors: Sequence[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """Return the current tensors of `module_arguments`; `AttributeError` if a path is gone.

        The inputs of Dynamo's graph in a call, `graph_tensors`, are most of them.
        """
        if graph_tensors is None:
            return self._lookup(self.module)
        positions, lookup = self._graph_positions
        others = iter(lookup(self.module))
        return [next(others) if p is None else graph_tensors[p] for p in positions]

    @cached_property
    def _guarded_buffers(self) -> Lookup:
        sources = self.value_guards.sources
        return Lookup([source.path for source in sources if source.position is None])

    def guarded_tensors(self, inputs: Sequence[Any]) -> list[torch.Tensor]:
        """Return the current tensors of ``value_guards.sources``, given flat inputs.

        Raises `AttributeError` if the path of a buffer no longer exists.
        """
        buffers = iter(self._guarded_buffers(self.module))
        return [
            next(buffers) if source.position is None else inputs[source.position]
            for source in self.value_guards.sources
        ]

    @cached_property
    def argument_positions(self) -> Mapping[fx.Node, int]:
        """Position of each argument, by its node."""
        return {argument.node: position for position, argument in enumerate(self.arguments)}

    def arguments_of(self, kind: InputKind) -> tuple[InputSpec, ...]:
        """Return the arguments of one kind, in order."""
        return tuple(argument for argument in self.arguments if argument.kind == kind)

    @cached_property
    def input_names(self) -> tuple[str, ...]:
        """The name of each flat input for display: ``inputs[0]``, or ``input_ids`` if named."""
        return input_names(self.input_spec, by_name=self.output is not None)

    def build_output(self, loss: torch.Tensor, other_tensors: Sequence[torch.Tensor]) -> Any:
        """Return the output of a step: the model's output with these tensors, or the loss alone.

        It is the loss alone if `output` is None.
        """
        return loss if self.output is None else self.output.build(loss, other_tensors)

    def tensors_by_name(self, output: Any) -> dict[str, torch.Tensor]:
        """Return the tensors in a step's output: loss and outputs, by `OutputSpec.name`.

        `output` has the structure that `build_output` returns; values that are no tensors are
        omitted.
        """
        if self.output is None:
            return {str(OutputKind.LOSS): output}
        return {
            f"{OutputKind.OUTPUT} {name}" if name else str(OutputKind.LOSS): tensor
            for name, tensor in self.output.tensors_by_name(output).items()
        }

    def flat_inputs(self, inputs: Inputs) -> tuple[Any, ...]:
        """Return the inputs of a step as a flat tuple.

        `inputs` is a mapping if the inputs of the capture were named, otherwise a sequence. Raises
        `CaptureError` if their nesting or names, or the order of keys in a nested mapping, differ
        from those of the capture.
        """
        if (values := self._input_nesting.take(inputs)) is not None:
            return values
        flat, spec = flatten(inputs)
        if spec == self.input_spec:
            return tuple(flat)
        if isinstance(inputs, Mapping):
            (named_inputs,) = unflatten(
                [_NestedInput()] * self.input_spec.num_leaves, self.input_spec
            )
            keys_by_problem = {
                "missing": named_inputs.keys() - inputs.keys(),
                "new": inputs.keys() - named_inputs.keys(),
            }
            problems = [
                f"{join_names(sorted(keys))} {problem}"
                for problem, keys in keys_by_problem.items()
                if keys
            ]
            if problems:
                raise CaptureError(
                    f"{self.name}: expected inputs by the names that the step was compiled with "
                    f"({join_names(sorted(named_inputs), max_names=9)}), and "
                    f"{' and '.join(problems)}"
                )
        n_expected, n_inputs = self.input_spec.num_children, spec.num_children
        if n_expected != n_inputs:
            msg = f"{self.name}: expected {n_expected} inputs (the target last), got {n_inputs}"
        else:
            nestings = [
                unflatten([_NestedInput()] * tree_spec.num_leaves, tree_spec)
                for tree_spec in (self.input_spec, spec)
            ]
            msg = f"{self.name}: expected inputs nested as {nestings[0]!r}, got {nestings[1]!r}"
        raise CaptureError(msg)

    def value(self, argument: InputSpec, inputs: Sequence[Any] | None = None) -> torch.Tensor:
        """Return the current value of an argument; `inputs` are by default those of the capture.

        Returns a parameter, buffer, input or constant itself, not a copy; for a value of an
        optimizer ``OptimizerValue.value()``; for a tangent ones divided by `accumulate`, on the
        device of the capture's first input tensor. Of an input that is a number, returns the number
        in `inputs`, although the graph contains that of the capture.
        """
        if argument.kind is InputKind.USER_INPUT:
            flat_inputs = self.inputs if inputs is None else inputs
            value: torch.Tensor = flat_inputs[argument.position]
            return value
        if argument.kind is InputKind.TANGENT:
            example = argument.node.meta["val"]
            device = next(
                (value.device for value in self.inputs if isinstance(value, torch.Tensor)), None
            )
            ones = torch.ones(tuple(example.shape), dtype=example.dtype, device=device)
            return ones / self.accumulate
        if argument.optimizer_value is not None:
            return argument.optimizer_value.value()
        is_constant = argument.kind is InputKind.CONSTANT_TENSOR
        owner = self.graph_module if is_constant else self.module
        tensor: torch.Tensor = attrgetter(argument.target)(owner)
        return tensor


class _NestedInput:
    """Stands for one input where a nesting of inputs is displayed."""

    def __repr__(self) -> str:
        return "*"


# -- from the descriptors of AOTAutograd -------------------------------------------------------

_KIND_BY_DESCRIPTOR: Final = {
    descriptors.ParamAOTInput: InputKind.PARAMETER,
    descriptors.BufferAOTInput: InputKind.BUFFER,
    descriptors.PlainAOTInput: InputKind.USER_INPUT,
    descriptors.TangentAOTInput: InputKind.TANGENT,
}


def input_specs(
    name: str, graph_module: fx.GraphModule, names: Sequence[str]
) -> Iterator[InputSpec]:
    """Yield the inputs of a captured graph: placeholders, then constant tensors, in graph order."""
    for node in graph_module.graph.find_nodes(op="placeholder"):
        descriptor = node.meta["desc"]
        kind = _KIND_BY_DESCRIPTOR.get(type(descriptor))
        if kind is None:
            raise CaptureError(_unsupported_message(name, "input", descriptor))
        target, position = getattr(descriptor, "target", ""), getattr(descriptor, "idx", 0)
        display_name = target.removeprefix(f"{BODY}.") or str(kind)
        if kind is InputKind.USER_INPUT:
            display_name = names[position]
        yield InputSpec(kind=kind, node=node, target=target, name=display_name, position=position)
    for node in graph_module.graph.find_nodes(op="get_attr"):
        target = str(node.target)
        if isinstance(attrgetter(target)(graph_module), torch.Tensor):
            display_name = target.removeprefix(f"{BODY}.")
            kind = InputKind.CONSTANT_TENSOR
            yield InputSpec(kind=kind, node=node, target=target, name=display_name)


def output_specs(
    name: str,
    graph_module: fx.GraphModule,
    arguments: Sequence[InputSpec],
    structure: OutputStructure | None,
    *,
    has_check: bool,
    n_stored: int,
) -> Iterator[OutputSpec]:
    """Yield the outputs of a captured graph in its order, except None, such as absent gradients.

    Without `structure`, the module's outputs are losses; with it, only the first. With `has_check`,
    the last of them is a check for finite numbers; before it are `n_stored` stored tensors.
    """
    argument_of = {
        argument.node.meta["desc"]: argument
        for argument in arguments
        if "desc" in argument.node.meta
    }
    output = graph_module.graph.output_node()
    first_stored = 1 + (0 if structure is None else len(structure.names))
    check_position = first_stored + n_stored if has_check else None
    for node, descriptor in zip(output.args[0], output.meta["desc"], strict=True):
        if node is None:
            continue
        if isinstance(descriptor, descriptors.PlainAOTOutput):
            if not hasattr(node, "meta"):
                raise CaptureError(
                    f"{name}: expected a loss that is a tensor, got a {type(node).__name__}"
                )
            if descriptor.idx == check_position:
                yield OutputSpec(kind=OutputKind.CHECK, node=node, target=None)
                continue
            if first_stored <= descriptor.idx < first_stored + n_stored:
                path = str(descriptor.idx - first_stored)
                yield OutputSpec(kind=OutputKind.STORED, node=node, target=None, path=path)
                continue
            if structure is None or descriptor.idx == 0:
                yield OutputSpec(kind=OutputKind.LOSS, node=node, target=None)
                continue
            path = structure.names[descriptor.idx - 1]
            yield OutputSpec(kind=OutputKind.OUTPUT, node=node, target=None, path=path)
        elif isinstance(descriptor, descriptors.GradAOTOutput):
            target = argument_of[descriptor.grad_of]
            yield OutputSpec(kind=OutputKind.GRADIENT, node=node, target=target)
        elif isinstance(descriptor, descriptors.InputMutationAOTOutput):
            target = argument_of[descriptor.mutated_input]
            yield OutputSpec(kind=OutputKind.MUTATION, node=node, target=target)
        else:
            raise CaptureError(_unsupported_message(name, "output", descriptor))


def _unsupported_message(name: str, direction: str, descriptor: object) -> str:
    """Return the message for an unsupported input or output (`direction`) of AOTAutograd."""
    if "Token" in type(descriptor).__name__:
        return (
            f"{name}: the step has an operation with an effect (it prints, for example), which "
            "cannot be repeated; leave it out"
        )
    return (
        f"{name}: the step has an {direction} of the kind {type(descriptor).__name__}, which is "
        "not supported; pass inputs that are plain tensors without shared memory, and return one "
        "loss"
    )
