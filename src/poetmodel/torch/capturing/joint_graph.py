"""A captured training step: its joint graph, and the graph signature of that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch._functorch._aot_autograd import descriptors

from poetmodel.errors import listed
from poetmodel.torch.capturing.inputs import flatten, input_names, unflatten
from poetmodel.torch.capturing.python_guards import PythonGuards
from poetmodel.torch.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import fx

    from poetmodel.torch.capturing.inputs import Inputs, OutputForm
    from poetmodel.torch.capturing.values import ValueGuards

BODY: Final = "model"
"""Where the user's module lies in the captured one."""

ANNOTATION: Final = "poetmodel.module"
"""Key under a node's ``custom`` annotations: the path of the module it was recorded in."""

PLACE: Final = "poetmodel.place"
"""The same of the words that name this module, and the line of a user's code that ran."""


def shown_path(path: str) -> str:
    """Return the path of a module below the user's, for people."""
    return path.removeprefix(BODY).lstrip(".")


def in_module(node: fx.Node) -> str:
    """Return " in " with the module and the line of an operation, as far as they are known."""
    notes = node.meta.get("custom") or {}
    path = shown_path(notes.get(ANNOTATION, ""))
    place = notes.get(PLACE) or (f"module {path!r}" if path else "")
    return f" in {place}" if place else ""


class InputKind(StrEnum):
    """Where an input of the graph comes from; `torch.export` has the same kinds, and no tangent."""

    PARAMETER = "parameter"
    """A parameter of the module or of the loss."""
    BUFFER = "buffer"
    USER_INPUT = "input"
    """A tensor that the step is called with."""
    TANGENT = "tangent"
    """The gradient that the backward pass starts from, of the shape of the loss."""
    CONSTANT_TENSOR = "constant"
    """A tensor that the module's code holds on to."""
    MOMENT = "moment"
    """Kinds of an optimizer's state for a parameter."""
    LEARNING_RATE = "learning rate"
    """That of a group of parameters, as the optimizer has it when the step begins."""


class OutputKind(StrEnum):
    """Purposes of an output of the graph."""

    LOSS = "loss"
    CHECK = "check"
    """Whether all numbers are finite that the model asked about."""
    OUTPUT = "output"
    """Further outputs of the model; handed out at the end of the step, detached."""
    GRADIENT = "gradient"
    """The gradient of an input; accumulated into its ``.grad``."""
    MUTATION = "mutation"
    """The new value of a buffer or input, due in it once, at the end of the step."""


class Held(Protocol):
    """What an optimizer holds of a step, such as a moment."""

    def value(self) -> torch.Tensor:
        """Return it as it is now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """An input of the graph: a value that is there before the step begins and stays for all of it.

    A constant is one too, although the graph fetches it itself.
    """

    kind: InputKind
    node: fx.Node
    """Its placeholder (for a constant: the node that fetches it)."""
    target: str
    """Path below the captured module, such as ``model.conv1.weight``; empty for others."""
    name: str
    """For people: the path below the user's module, or ``inputs[0]``."""
    position: int = 0
    """For a user's input its place among the flat inputs."""
    held: Held | None = None
    """Where the value is that an optimizer holds; None for others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSpec:
    """An output of the graph: a value that the step hands out."""

    kind: OutputKind
    node: fx.Node
    """The node whose value it is; may be a view, or the node of an input."""
    target: InputSpec | None
    """The input whose gradient or new value it is; None for the loss and outputs."""
    path: str = ""
    """For an output where it is in what the model returns; empty for others."""

    @property
    def name(self) -> str:
        """Description for users: ``loss``, ``output logits``, ``gradient of conv1.weight``."""
        if self.target is None:
            return f"{self.kind} {self.path}".strip()
        return f"{self.kind} of {self.target.name}"


class Lookup:
    """Finds what lies below a module at some paths, such as ``layers.0.weight``.

    What is there at the time of the call counts: modules and tensors may be replaced between two
    calls. Modules that several paths go through are fetched once, for speed.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._tensors = [path.rpartition(".")[::2] for path in paths]
        parts = [owner.split(".") for owner, _ in self._tensors if owner]
        owners = (".".join(names[: k + 1]) for names in parts for k in range(len(names)))
        self._modules = [(path, *path.rpartition(".")[::2]) for path in dict.fromkeys(owners)]
        """Path of each module below the first, of the one that it is in, and its name there."""

    def __call__(self, module: torch.nn.Module) -> list[torch.Tensor]:
        """Return the objects there, in the order of the paths."""
        modules = {"": module}
        for path, owner, name in self._modules:
            child = modules[owner].__dict__["_modules"].get(name)
            modules[path] = getattr(modules[owner], name) if child is None else child
        return [_tensor(modules[owner], name) for owner, name in self._tensors]


def _tensor(module: torch.nn.Module, name: str) -> Any:
    """Return the result of `getattr`, in a tenth of its time for attributes that modules keep."""
    state = module.__dict__
    tensor = state["_parameters"].get(name)
    if tensor is None:
        tensor = state["_buffers"].get(name)
    return getattr(module, name) if tensor is None else tensor


@dataclass(frozen=True, kw_only=True)
class Joint:
    """A captured step: the joint graph of forward, loss and backward, and its signature."""

    name: str
    """Name in messages."""
    module: torch.nn.Module
    """The captured module: the user's at `BODY`, with the loss applied to its output; takes flat
    inputs."""
    graph_module: fx.GraphModule
    """Forward, loss and backward; functional: no operation changes a tensor in place."""
    arguments: tuple[InputSpec, ...]
    """Inputs: placeholders in order, then constants."""
    results: tuple[OutputSpec, ...]
    """Outputs, in the order of the graph's output; absent gradients are left out."""
    input_spec: Any
    """How inputs are flattened (``torch.utils._pytree.TreeSpec``)."""
    inputs: tuple[Any, ...]
    """The inputs it was captured with, flat."""
    read: ValueGuards
    """Values of inputs and buffers that Python code of the model read: the graph holds for them."""
    python: PythonGuards = field(default_factory=PythonGuards)
    """Python values that the code of the model read: the graph holds for them."""
    output: OutputForm | None = None
    """Outputs of a step that gets its inputs by name; None if it returns its loss."""
    accumulate: int = 1
    """Divisor of the loss at the start of the backward pass."""
    checked: tuple[str, ...] = ()
    """The lines that ask whether numbers are finite; the step is undone where they are not."""
    optimizer: torch.optim.Optimizer | None = None
    """Whose updates are part of the step; None where it ends with the gradients."""
    clip_grad_norm: float | None = None
    """The largest norm of all gradients together; None where they are not clipped."""

    @cached_property
    def owned(self) -> tuple[InputSpec, ...]:
        """The arguments that are tensors of the module: parameters and buffers, in order."""
        kinds = (InputKind.PARAMETER, InputKind.BUFFER)
        return tuple(a for a in self.arguments if a.kind in kinds)

    @cached_property
    def _lookup(self) -> Lookup:
        return Lookup([a.target for a in self.owned])

    def owned_values(self) -> list[torch.Tensor]:
        """Return the present objects of `owned`."""
        return self._lookup(self.module)

    @cached_property
    def _read_buffers(self) -> Lookup:
        return Lookup([source.path for source in self.read.sources if source.position is None])

    def read_from(self, inputs: Sequence[Any]) -> list[torch.Tensor]:
        """Return the present objects of the sources of `read`, for flat inputs."""
        buffers = iter(self._read_buffers(self.module))
        return [
            next(buffers) if source.position is None else inputs[source.position]
            for source in self.read.sources
        ]

    def of(self, kind: InputKind) -> tuple[InputSpec, ...]:
        """Return the arguments of one kind, in order."""
        return tuple(a for a in self.arguments if a.kind == kind)

    @cached_property
    def input_names(self) -> tuple[str, ...]:
        """For each flat input what it is, for people: ``inputs[0]``, or by name ``input_ids``."""
        return input_names(self.input_spec, by_name=self.output is not None)

    def returned(self, loss: torch.Tensor, others: Sequence[torch.Tensor]) -> Any:
        """Return the outputs of a step: its loss, or an output of the model with its tensors."""
        return loss if self.output is None else self.output.filled(loss, others)

    def named(self, returned: Any) -> dict[str, torch.Tensor]:
        """Return the tensors of what a step hands out, by the names of their results."""
        if self.output is None:
            return {str(OutputKind.LOSS): returned}
        return {
            f"{OutputKind.OUTPUT} {name}" if name else str(OutputKind.LOSS): tensor
            for name, tensor in self.output.named(returned).items()
        }

    def flat_inputs(self, inputs: Inputs) -> tuple[Any, ...]:
        """Return the inputs of a step as a flat tuple.

        Raises `CaptureError` if they are not nested as those that it was captured with.
        """
        flat, spec = flatten(inputs)
        if spec == self.input_spec:
            return tuple(flat)
        if isinstance(inputs, Mapping):
            (known,) = unflatten([_Star()] * self.input_spec.num_leaves, self.input_spec)
            sets = {"missing": known.keys() - inputs.keys(), "new": inputs.keys() - known.keys()}
            apart = [f"{listed(sorted(keys))} {word}" for word, keys in sets.items() if keys]
            if apart:
                raise CaptureError(
                    f"{self.name}: expected inputs by the names that the step was compiled with "
                    f"({listed(sorted(known), most=9)}), and {' and '.join(apart)}"
                )
        expected, got = self.input_spec.num_children, spec.num_children
        if expected != got:
            msg = f"{self.name}: expected {expected} inputs (the target last), got {got}"
        else:
            nests = [unflatten([_Star()] * s.num_leaves, s) for s in (self.input_spec, spec)]
            msg = f"{self.name}: expected inputs nested as {nests[0]!r}, got {nests[1]!r}"
        raise CaptureError(msg)

    def value(self, argument: InputSpec, inputs: Sequence[Any] | None = None) -> torch.Tensor:
        """Return the present object of an argument: of flat inputs, or those of the capture.

        The parameter or buffer itself, the input, the constant, or for a tangent ones, divided. An
        input that is a number and no tensor is itself; the graph holds it as it was at the capture.
        """
        if argument.kind is InputKind.USER_INPUT:
            chosen = self.inputs if inputs is None else inputs
            value: torch.Tensor = chosen[argument.position]
            return value
        if argument.kind is InputKind.TANGENT:
            example = argument.node.meta["val"]
            device = next((a.device for a in self.inputs if isinstance(a, torch.Tensor)), None)
            ones = torch.ones(tuple(example.shape), dtype=example.dtype, device=device)
            return ones / self.accumulate
        if argument.held is not None:
            return argument.held.value()
        constant = argument.kind is InputKind.CONSTANT_TENSOR
        owner = self.graph_module if constant else self.module
        tensor: torch.Tensor = attrgetter(argument.target)(owner)
        return tensor


class _Star:
    def __repr__(self) -> str:
        return "*"


# -- from the descriptors of AOTAutograd -------------------------------------------------------

_KINDS: Final = {
    descriptors.ParamAOTInput: InputKind.PARAMETER,
    descriptors.BufferAOTInput: InputKind.BUFFER,
    descriptors.PlainAOTInput: InputKind.USER_INPUT,
    descriptors.TangentAOTInput: InputKind.TANGENT,
}


def input_specs(
    name: str, graph_module: fx.GraphModule, names: Sequence[str]
) -> Iterator[InputSpec]:
    """Yield what goes into a captured graph: placeholders in order, then constants."""
    for node in graph_module.graph.find_nodes(op="placeholder"):
        descriptor = node.meta["desc"]
        kind = _KINDS.get(type(descriptor))
        if kind is None:
            raise CaptureError(_unknown(name, "input", descriptor))
        target, position = getattr(descriptor, "target", ""), getattr(descriptor, "idx", 0)
        shown = target.removeprefix(f"{BODY}.") or str(kind)
        if kind is InputKind.USER_INPUT:
            shown = names[position]
        yield InputSpec(kind=kind, node=node, target=target, name=shown, position=position)
    for node in graph_module.graph.find_nodes(op="get_attr"):
        target = str(node.target)
        if isinstance(attrgetter(target)(graph_module), torch.Tensor):
            shown = target.removeprefix(f"{BODY}.")
            kind = InputKind.CONSTANT_TENSOR
            yield InputSpec(kind=kind, node=node, target=target, name=shown)


def output_specs(
    name: str,
    graph_module: fx.GraphModule,
    arguments: Sequence[InputSpec],
    form: OutputForm | None,
    *,
    checked: bool,
) -> Iterator[OutputSpec]:
    """Yield what comes out of a captured graph; absent gradients are left out.

    `checked` says that the last of what the module returns is a check.
    """
    targets = {a.node.meta["desc"]: a for a in arguments if "desc" in a.node.meta}
    output = graph_module.graph.output_node()
    plain = [d.idx for d in output.meta["desc"] if isinstance(d, descriptors.PlainAOTOutput)]
    for node, descriptor in zip(output.args[0], output.meta["desc"], strict=True):
        if node is None:
            continue
        if isinstance(descriptor, descriptors.PlainAOTOutput):
            if not hasattr(node, "meta"):
                raise CaptureError(
                    f"{name}: expected a loss that is a tensor, got a {type(node).__name__}"
                )
            if checked and descriptor.idx == max(plain):
                yield OutputSpec(kind=OutputKind.CHECK, node=node, target=None)
                continue
            if form is None or descriptor.idx == 0:
                yield OutputSpec(kind=OutputKind.LOSS, node=node, target=None)
                continue
            path = form.names[descriptor.idx - 1]
            yield OutputSpec(kind=OutputKind.OUTPUT, node=node, target=None, path=path)
        elif isinstance(descriptor, descriptors.GradAOTOutput):
            target = targets[descriptor.grad_of]
            yield OutputSpec(kind=OutputKind.GRADIENT, node=node, target=target)
        elif isinstance(descriptor, descriptors.InputMutationAOTOutput):
            target = targets[descriptor.mutated_input]
            yield OutputSpec(kind=OutputKind.MUTATION, node=node, target=target)
        else:
            raise CaptureError(_unknown(name, "output", descriptor))


def _unknown(name: str, way: str, descriptor: object) -> str:
    if "Token" in type(descriptor).__name__:
        return (
            f"{name}: the step has an operation that does more than compute (it prints, say), and "
            "cannot be repeated; leave it out"
        )
    return (
        f"{name}: the step has an {way} of the kind {type(descriptor).__name__}, which is not "
        "supported; give inputs that are plain tensors and share no memory, and return one loss"
    )
