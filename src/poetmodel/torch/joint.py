"""Capture: module, loss and inputs become one functional graph of forward, loss and backward.

This is the only module that calls what PyTorch does not promise to keep:
``aot_export_joint_with_descriptors`` (PyTorch 2.9 and newer) and its descriptors.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from poetmodel.torch.admission import check_joint, check_step
from poetmodel.torch.annotation import BODY, annotated, shown_path
from poetmodel.torch.attributes import AssignedBuffers, Attributes
from poetmodel.torch.batches import flatten, loss_in, takes_keywords, unflatten
from poetmodel.torch.decompositions import native_operators
from poetmodel.torch.draws import Draws
from poetmodel.torch.failures import CaptureError, explained
from poetmodel.torch.layouts import fake_mode
from poetmodel.torch.lookup import Lookup
from poetmodel.torch.recurrent import captured_recurrence
from poetmodel.torch.requirement import require_torch
from poetmodel.torch.roles import Argument, Purpose, Result, Source
from poetmodel.torch.seeding import refused_seeding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch
    from torch import fx

_LOG: Final = logging.getLogger(__name__)

LOSS: Final = "loss"
"""Where a loss with parameters of its own lies in the captured one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """The captured step, and the roles of all that goes in and comes out."""

    name: str
    """What messages call it."""
    module: torch.nn.Module
    """The captured module: the user's at `BODY`, with the loss applied to its output; takes flat
    inputs."""
    graph_module: fx.GraphModule
    """Forward, loss and backward; functional: no operation changes a tensor in place."""
    arguments: tuple[Argument, ...]
    """What goes in: placeholders in order, then constants."""
    results: tuple[Result, ...]
    """What comes out, in the order of the graph's output; absent gradients are left out."""
    input_spec: Any
    """How inputs are flattened (``torch.utils._pytree.TreeSpec``)."""
    inputs: tuple[Any, ...]
    """The inputs it was captured with, flat."""
    lookup: Lookup = field(init=False, repr=False, compare=False)
    """Finds the values of `owned`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "lookup", Lookup([a.target for a in self.owned]))

    @property
    def owned(self) -> tuple[Argument, ...]:
        """The arguments that are tensors of the module: parameters and buffers, in order."""
        return tuple(a for a in self.arguments if a.source in (Source.PARAMETER, Source.BUFFER))

    def owned_values(self) -> list[torch.Tensor]:
        """Return what `owned` stand for now."""
        return self.lookup(self.module)

    def of(self, source: Source) -> tuple[Argument, ...]:
        """Return the arguments of one source, in order."""
        return tuple(a for a in self.arguments if a.source == source)

    def flat_inputs(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Return the inputs of a step as a flat tuple.

        Raises
        ------
        CaptureError
            If they are not nested as those that it was captured with.
        """
        flat, spec = flatten(inputs)
        if spec != self.input_spec:
            one, other = self.input_spec.num_children, len(inputs)
            if one != other:
                msg = f"{self.name}: expected {one} inputs (the target last), got {other}"
                raise CaptureError(msg)
            told = f"expected inputs nested as {_nesting(self.input_spec)}, got {_nesting(spec)}"
            msg = f"{self.name}: {told}"
            raise CaptureError(msg)
        return tuple(flat)

    def value(self, argument: Argument, inputs: Sequence[Any] | None = None) -> torch.Tensor:
        """Return what an argument stands for now.

        Parameters
        ----------
        argument : Argument
            One of `arguments`.
        inputs : sequence, optional
            Flat inputs of the step; by default those that it was captured with.

        Returns
        -------
        torch.Tensor
            The parameter or buffer itself, the input, the constant, or ones for a tangent. An input
            that is a number and no tensor is itself; the graph holds it as it was at the capture.
        """
        import torch

        if argument.source is Source.INPUT:
            chosen = self.inputs if inputs is None else inputs
            found: torch.Tensor = chosen[argument.position or 0]
            return found
        if argument.source is Source.TANGENT:
            example = argument.node.meta["val"]
            device = next((a.device for a in self.inputs if isinstance(a, torch.Tensor)), None)
            return torch.ones(tuple(example.shape), dtype=example.dtype, device=device)
        owner = self.graph_module if argument.source is Source.CONSTANT else self.module
        tensor: torch.Tensor = attrgetter(argument.target)(owner)
        return tensor


def _nesting(spec: Any) -> str:
    """Return how inputs are nested, with a star for each leaf."""
    return repr(unflatten([_STAR] * spec.num_leaves, spec))


class _Star:
    def __repr__(self) -> str:
        return "*"


_STAR: Final = _Star()


def capture(
    model: torch.nn.Module,
    loss_fn: Callable[..., torch.Tensor] | None,
    inputs: Sequence[Any],
    *,
    name: str | None = None,
) -> Joint:
    """Capture a training step: forward pass, loss, and backward pass.

    Parameters
    ----------
    model : torch.nn.Module
        The network, in the mode (train or eval) that it is to run in.
    loss_fn : callable, optional
        The loss is ``loss_fn(model(*inputs[:-1]), inputs[-1])``; without it, it is
        ``model(*inputs)``.
    inputs : sequence
        Example inputs, the target last; tensors or nests of tensors.
    name : str, optional
        What to call it; by default the class of `model`.

    Returns
    -------
    Joint
        Parameters, gradients, buffers and the state of random generators stay as they were.

    Raises
    ------
    CaptureError
        If the step cannot be captured: says which operation, where, and what to do.
    BackendUnavailableError
        If PyTorch is missing or too old.
    """
    require_torch()
    import torch

    name = name or type(model).__name__
    check_step(name, model, loss_fn, inputs)
    flat, spec = flatten(inputs)
    stepped, assigned = _with_loss(
        name,
        model,
        loss_fn,
        spec,
        by_name=takes_keywords(model, inputs if loss_fn is None else inputs[:-1]),
    )
    attributes = Attributes(stepped)
    draws = Draws(name, attributes)
    # PyTorch runs the model several times; each time begins with the attributes of the first.
    assigned.at_start = lambda: attributes.put_back(within=True)
    trail: list[str] = []
    mkldnn = torch.backends.mkldnn.enabled
    try:
        with (
            _quiet(),
            draws.kept(),
            explained(name, trail),
            refused_seeding(),
            captured_recurrence(stepped),
            native_operators(),
        ):
            with annotated(stepped, trail, draws.check):
                graph_module = _export(stepped, tuple(flat), mkldnn=mkldnn)
            if assigned.learn():
                attributes.put_back()
                with annotated(stepped, trail, draws.check):
                    graph_module = _export(stepped, tuple(flat), mkldnn=mkldnn)
            draws.check()
    finally:
        assigned.at_start = None
        stale = attributes.put_back()
    _tell_stale(name, stale)
    arguments = tuple(_arguments(name, graph_module))
    joint = Joint(
        name=name,
        module=stepped,
        graph_module=graph_module,
        arguments=arguments,
        results=tuple(_results(name, graph_module, arguments)),
        input_spec=spec,
        inputs=tuple(flat),
    )
    check_joint(joint)
    return joint


def _tell_stale(name: str, stale: Sequence[tuple[str, str]]) -> None:
    """Log which attributes hold tensors in eager, and stay as they are in compiled steps."""
    if stale:
        shown = ", ".join(
            ".".join(part for part in (shown_path(path), key) if part) for path, key in stale
        )
        _LOG.warning(
            "%s: forward sets %s, which a compiled step does not: the code of the model runs once, "
            "and the attribute was put back; to have it updated, make it a buffer "
            "(register_buffer) and assign it with .detach()",
            name,
            shown,
        )


def _with_loss(
    name: str,
    model: torch.nn.Module,
    loss_fn: Callable[..., torch.Tensor] | None,
    form: Any,
    *,
    by_name: bool,
) -> tuple[torch.nn.Module, AssignedBuffers]:
    """Return a module from flat inputs to the loss; it holds the user's modules, not copies."""
    import torch

    class Step(torch.nn.Module):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.add_module(BODY, model)
            if isinstance(loss_fn, torch.nn.Module):
                self.add_module(LOSS, loss_fn)
            self.training = model.training

        def forward(self, *flat: Any) -> Any:
            with assigned.around():
                inputs = unflatten(flat, form)
                given = inputs if loss_fn is None else inputs[:-1]
                output = model(**given[0]) if by_name else model(*given)
                return loss_in(name, output if loss_fn is None else loss_fn(output, inputs[-1]))

    stepped = Step()
    assigned = AssignedBuffers(stepped, name=name)
    return stepped, assigned


def _export(stepped: torch.nn.Module, inputs: tuple[Any, ...], *, mkldnn: bool) -> fx.GraphModule:
    """Call PyTorch's capture."""
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
    from torch._guards import TracingContext, tracing

    context = TracingContext(fake_mode(mkldnn=mkldnn))
    with ExitStack() as stack, tracing(context):
        exported = aot_export_joint_with_descriptors(stack, stepped, inputs)
        graph_module: fx.GraphModule = exported.graph_module
    return graph_module


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep PyTorch from logging the traceback of a failure that is raised anyway."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _arguments(name: str, graph_module: fx.GraphModule) -> Iterator[Argument]:
    from torch._functorch._aot_autograd import descriptors

    sources = {
        descriptors.ParamAOTInput: Source.PARAMETER,
        descriptors.BufferAOTInput: Source.BUFFER,
        descriptors.PlainAOTInput: Source.INPUT,
        descriptors.TangentAOTInput: Source.TANGENT,
    }
    for node in graph_module.graph.find_nodes(op="placeholder"):
        descriptor = node.meta["desc"]
        source = sources.get(type(descriptor))
        if source is None:
            raise CaptureError(_unknown(name, "input", descriptor))
        yield _argument(
            source,
            node,
            target=getattr(descriptor, "target", ""),
            position=getattr(descriptor, "idx", None),
        )
    for node in graph_module.graph.find_nodes(op="get_attr"):
        value = attrgetter(str(node.target))(graph_module)
        if hasattr(value, "untyped_storage"):
            yield _argument(Source.CONSTANT, node, target=str(node.target), position=None)


def _argument(source: Source, node: fx.Node, *, target: str, position: int | None) -> Argument:
    example = node.meta.get("val")
    known = hasattr(example, "untyped_storage")
    name = target.removeprefix(f"{BODY}.") or str(source)
    if source is Source.INPUT:
        name = f"inputs[{position}]"
    return Argument(
        source=source,
        node=node,
        target=target,
        name=name,
        position=position,
        bytes=example.untyped_storage().nbytes() if known else 0,
    )


def _results(
    name: str, graph_module: fx.GraphModule, arguments: Sequence[Argument]
) -> Iterator[Result]:
    from torch._functorch._aot_autograd import descriptors

    by_descriptor = {a.node.meta["desc"]: a for a in arguments if "desc" in a.node.meta}
    output = graph_module.graph.output_node()
    for node, descriptor in zip(output.args[0], output.meta["desc"], strict=True):
        if node is None:
            continue
        if isinstance(descriptor, descriptors.PlainAOTOutput):
            if not hasattr(node, "meta"):
                msg = f"{name}: expected a loss that is a tensor, got a {type(node).__name__}"
                raise CaptureError(msg)
            yield Result(purpose=Purpose.LOSS, node=node, of=None)
        elif isinstance(descriptor, descriptors.GradAOTOutput):
            of = by_descriptor[descriptor.grad_of]
            yield Result(purpose=Purpose.GRADIENT, node=node, of=of)
        elif isinstance(descriptor, descriptors.InputMutationAOTOutput):
            of = by_descriptor[descriptor.mutated_input]
            yield Result(purpose=Purpose.MUTATION, node=node, of=of)
        else:
            raise CaptureError(_unknown(name, "output", descriptor))


def _unknown(name: str, kind: str, descriptor: object) -> str:
    if "Token" in type(descriptor).__name__:
        return (
            f"{name}: the step has an operation that does more than compute, such as the checks of "
            "torch.linalg, and cannot be repeated; use what does not check (inv_ex, cholesky_ex, "
            "solve_ex, ...)"
        )
    return (
        f"{name}: the step has an {kind} of the kind {type(descriptor).__name__}, which is not "
        "supported; give inputs that are plain tensors and share no memory, and return one loss"
    )
