"""Capture: module, loss and inputs become one functional graph of forward, loss and backward.

This module and `graph_signature` alone use what PyTorch does not promise to keep:
``aot_export_joint_with_descriptors`` (PyTorch 2.9 and newer) and its descriptors.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
import torch._decomp  # registers the kernels that `native_operators` takes away
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing
from torch.fx import traceback

from poetmodel.collection import rare_collections
from poetmodel.torch.errors import SeedError, explained
from poetmodel.torch.fake_tensors import fake_mode, onednn
from poetmodel.torch.graph_signature import (
    ANNOTATION,
    BODY,
    Joint,
    OutputKind,
    in_module,
    input_names,
    input_specs,
    output_specs,
    shown_path,
)
from poetmodel.torch.inputs import (
    flatten,
    refuse,
    step_faults,
    takes_keywords,
    unflatten,
)
from poetmodel.torch.interpreter import temporarily, tensors_in
from poetmodel.torch.known_values import Given, KnownValues
from poetmodel.torch.module_state import AssignedBuffers, Attributes, Draws
from poetmodel.torch.outputs import OutputForm, loss_in
from poetmodel.torch.value_guards import ValueGuards

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import fx

    from poetmodel.torch.inputs import Inputs

_LOG: Final = logging.getLogger(__name__)

LOSS: Final = "loss"
"""Where a loss with parameters of its own lies in the captured one."""


def capture(
    model: torch.nn.Module,
    loss_fn: Callable[..., torch.Tensor] | None,
    inputs: Inputs,
    *,
    name: str | None = None,
) -> Joint:
    """Capture a training step: forward pass, loss, and backward pass.

    Parameters
    ----------
    model, loss_fn, inputs
        As for `compile`.
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
    """
    name = name or type(model).__name__
    refuse(name, step_faults(model, loss_fn, inputs))
    flat, spec = flatten(inputs)
    by_name = takes_keywords(
        model, inputs if loss_fn is None or isinstance(inputs, Mapping) else inputs[:-1]
    )
    returned: list[OutputForm] | None = [] if isinstance(inputs, Mapping) else None
    stepped, assigned = _with_loss(name, model, loss_fn, spec, by_name=by_name, returned=returned)
    attributes = Attributes(stepped)
    draws = Draws(name, attributes)
    # PyTorch runs the model several times; each time begins with the attributes of the first.
    assigned.at_start = lambda: attributes.put_back(within=True)
    trail: list[str] = []
    mkldnn = torch.backends.mkldnn.enabled
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    has_lstm = any(isinstance(module, torch.nn.LSTM) for module in stepped.modules())
    try:
        with (
            # A failure that is raised anyway need not be logged, with its traceback, too.
            temporarily(logger.setLevel, logging.CRITICAL, logger.level),
            draws.kept(),
            explained(name, trail),
            _refused_seeding(),
            # The LSTM of oneDNN has a backward that cannot be captured.
            onednn(enabled=mkldnn and not has_lstm),
            native_operators(),
            rare_collections(),
        ):
            while True:
                values = KnownValues()
                context = TracingContext(fake_mode(values, mkldnn=mkldnn))
                recorded = _annotated(stepped, trail, draws.check)
                given = _given(stepped, flat, values)
                with recorded, given, ExitStack() as stack, tracing(context):
                    exported = aot_export_joint_with_descriptors(stack, stepped, tuple(flat))
                if not assigned.learn():
                    break
                attributes.put_back()
            draws.check()
    finally:
        assigned.at_start = None
        stale = attributes.put_back()
    if stale:
        _LOG.warning(
            "%s: forward sets %s, which a compiled step does not: the code of the model runs once, "
            "and the attribute was put back; to have it updated, make it a buffer "
            "(register_buffer) and assign it with .detach()",
            name,
            ", ".join(shown_path(f"{path}.{key}") for path, key in stale),
        )
    graph_module = exported.graph_module
    for node in graph_module.graph.nodes:
        values.forget(node.meta.get("val"))
    output = returned[0] if returned else None
    names = input_names(spec, by_name=output is not None)
    arguments = tuple(input_specs(name, graph_module, names))
    joint = Joint(
        name=name,
        module=stepped,
        graph_module=graph_module,
        arguments=arguments,
        results=tuple(output_specs(name, graph_module, arguments, output)),
        input_spec=spec,
        inputs=tuple(flat),
        read=ValueGuards(tuple(values.reads.values())),
        output=output,
    )
    refuse(name, _faults(joint))
    changed = {
        result.target.target: result.target.name for result in joint.results if result.target
    }
    unsteady = [changed[g.path] for g in joint.read.sources if changed.keys() & {g.path}]
    if unsteady:
        _LOG.warning(
            "%s: forward reads %s, which each step changes: once it reads something else, the step "
            "is refused, or compiled again (dynamic='retrace')",
            name,
            ", ".join(unsteady),
        )
    return joint


def _with_loss(
    name: str,
    model: torch.nn.Module,
    loss_fn: Callable[..., torch.Tensor] | None,
    form: Any,
    *,
    by_name: bool,
    returned: list[OutputForm] | None,
) -> tuple[torch.nn.Module, AssignedBuffers]:
    """Return a module from flat inputs to the loss; it holds the user's modules, not copies.

    Where a list is given, the module returns the loss and, detached, the other tensors that the
    model returns; their form goes to the list.
    """

    class FlatModule(torch.nn.Module):  # type: ignore[misc, unused-ignore]
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
                loss = loss_in(name, output if loss_fn is None else loss_fn(output, inputs[-1]))
                if returned is None:
                    return loss
                found, others = OutputForm.of(output, loss)
                returned[:] = [found]
                return (loss, *(tensor.detach() for tensor in others))

    stepped = FlatModule()
    assigned = AssignedBuffers(stepped, name=name)
    return stepped, assigned


def _faults(joint: Joint) -> Iterator[str]:
    """Yield why a captured step has not one loss, trains nothing, or cannot be replayed."""
    losses = [r.node.meta["val"] for r in joint.results if r.kind is OutputKind.LOSS]
    if len(losses) != 1 or losses[0].numel() != 1:
        shapes = [tuple(loss.shape) for loss in losses]
        yield (
            f"expected one loss with one element, got shapes {shapes}; "
            "reduce it with .mean() or .sum()"
        )
    if losses[0].is_complex():
        yield "expected a loss that is a real number; take .real or .abs() of it"
    if not any(result.kind is OutputKind.GRADIENT for result in joint.results):
        yield "the loss depends on no parameter that requires a gradient"
    graph = joint.graph_module.graph
    for node in graph.find_nodes(op="get_attr"):
        value = attrgetter(str(node.target))(joint.graph_module)
        if not isinstance(value, torch.Tensor):
            yield _object_fault(next(iter(node.users), node), type(value).__name__)
    for node in graph.nodes:
        if any(value.layout != torch.strided for value in tensors_in(node.meta.get("val"))):
            yield (
                f"{node.target}{in_module(node)} makes a sparse tensor, which cannot be scheduled; "
                "use dense ones (for an embedding: sparse=False)"
            )
        schema = getattr(node.target, "_schema", None)
        if node.op == "call_function" and schema is not None and schema.is_mutable:
            yield (
                f"{node.target}{in_module(node)} changes a tensor in place and cannot be replayed; "
                "use its functional form"
            )


def _object_fault(user: fx.Node, kind: str) -> str:
    """Return what is wrong where an operation takes a random generator, or another object."""
    what = f"{user.target}{in_module(user)} takes"
    if "Generator" in kind or "generator" in user.kwargs:
        return (
            f"{what} a random generator of its own, whose draws cannot be repeated; draw from the "
            "default generator (leave generator= out), or draw outside of the step"
        )
    return f"{what} a {kind}, which cannot be replayed; leave it out"


# -- what is in force while PyTorch captures ---------------------------------------------------


@contextmanager
def _annotated(
    stepped: torch.nn.Module, trail: list[str], check: Callable[[Sequence[str]], object]
) -> Iterator[None]:
    """Let every node that is recorded inside carry the path of the module it came from.

    PyTorch 2.9 cannot do that; names then say the operator only. The modules that run when
    something is raised are left in the trail, the innermost one last; it is checked where one of
    them begins and ends.
    """
    annotate = getattr(traceback, "annotate", None)
    if annotate is None:
        yield
        return
    open_contexts: list[Any] = []
    trail.clear()

    def enter(path: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, *_: Any) -> None:
            check(trail)
            context = annotate({ANNOTATION: path})
            context.__enter__()
            open_contexts.append(context)
            shown = shown_path(path)
            kind = type(module).__name__
            trail.append(f"module {shown!r} ({kind})" if shown else f"module {kind}")

        return hook

    def leave(*_: Any) -> None:
        check(trail)
        open_contexts.pop().__exit__(None, None, None)
        trail.pop()

    handles = []
    for path, module in stepped.named_modules():
        handles.append(module.register_forward_pre_hook(enter(path)))
        handles.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        while open_contexts:
            open_contexts.pop().__exit__(None, None, None)


@contextmanager
def _given(stepped: torch.nn.Module, inputs: Sequence[Any], values: KnownValues) -> Iterator[None]:
    """Let the values of inputs and buffers be known to each forward pass inside."""
    buffers = {path: b.detach() for path, b in stepped.named_buffers(remove_duplicate=False)}
    reals = [value.detach() if isinstance(value, torch.Tensor) else None for value in inputs]

    def hook(_: torch.nn.Module, flat: Sequence[Any]) -> None:
        for position, (fake, real) in enumerate(zip(flat, reals, strict=True)):
            if real is not None:
                values.give(fake, real, Given(position))
        for path, fake in stepped.named_buffers(remove_duplicate=False):
            values.give(fake, buffers[path], Given(None, path))

    handle = stepped.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


_PREFIXES: Final = ("upsample_", "_upsample_")
_NAMES: Final = (
    "gru",
    "hardshrink",
    "istft",
    "lstm",
    "matmul",
    "multi_margin_loss",
    "multilabel_margin_loss_forward",
    "rnn_relu",
    "rnn_tanh",
    "softshrink",
    "stft",
)
"""Operators that a capture would decompose into others, with other roundings or strides."""


@contextmanager
def native_operators() -> Iterator[None]:
    """Leave operators whole that a capture would decompose otherwise than eager does.

    While it traces, PyTorch's dispatcher looks for Python kernels of an operator first. Some
    put other operators in place of one: ``upsample_nearest2d`` becomes an index, whose gradient
    lies otherwise in memory, so that sums of it run in another order. The kernels that stay are
    those that a capture needs (batch norm), and those that compute the very same.
    """
    kinds = torch._C.DispatchKey  # noqa: SLF001 - as PyTorch's own registrations
    taken: list[tuple[Any, Any, Any]] = []
    for operator in _operators():
        for key in (kinds.Autograd, kinds.CompositeImplicitAutograd):
            if key in operator.py_kernels:
                taken.append((operator, key, operator.py_kernels.pop(key)))
        operator._dispatch_cache.clear()  # noqa: SLF001 - no other way
    try:
        yield
    finally:
        for operator, key, kernel in taken:
            operator.py_kernels[key] = kernel
            operator._dispatch_cache.clear()  # noqa: SLF001 - as above


def _operators() -> Iterator[Any]:
    for name in dir(torch.ops.aten):
        if name in _NAMES or name.startswith(_PREFIXES):
            packet = getattr(torch.ops.aten, name)
            for overload in packet.overloads():
                yield getattr(packet, overload)


@contextmanager
def _refused_seeding() -> Iterator[None]:
    """Raise `SeedError` where the generator is seeded inside; put its state back afterwards."""
    generator = torch.default_generator
    with torch.random.fork_rng(devices=[]):
        # What torch.manual_seed and torch.seed call; the functions themselves must stay, because
        # PyTorch keeps tables of them, which it may make inside.
        torch.default_generator = torch.random.default_generator = _Unseedable(generator)
        try:
            yield
        finally:
            torch.default_generator = torch.random.default_generator = generator


class _Unseedable:
    """A random generator that cannot be seeded."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def manual_seed(self, _: int) -> NoReturn:
        raise SeedError

    def seed(self) -> NoReturn:
        raise SeedError
