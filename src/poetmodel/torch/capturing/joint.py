"""Capture: module, loss and inputs become one functional graph of forward, loss and backward.

What PyTorch does not promise to keep is used here (``aot_export_joint_with_descriptors``, PyTorch
2.9 and newer) and in `joint_graph` (its descriptors), `values` and `surroundings`.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing

from poetmodel.clock import rare_collections
from poetmodel.errors import listed
from poetmodel.torch.capturing.inputs import (
    OutputForm,
    apart,
    flatten,
    input_names,
    loss_in,
    refuse,
    step_faults,
    takes_keywords,
    unflatten,
)
from poetmodel.torch.capturing.joint_graph import (
    BODY,
    InputKind,
    Joint,
    OutputKind,
    in_module,
    input_specs,
    output_specs,
    shown_path,
)
from poetmodel.torch.capturing.modules import AssignedBuffers, Attributes, Draws, Leftovers
from poetmodel.torch.capturing.python_reads import PythonReads
from poetmodel.torch.capturing.replay import temporarily
from poetmodel.torch.capturing.state_changes import StateChanges, WrittenTensors
from poetmodel.torch.capturing.surroundings import (
    annotated,
    drawing,
    fake_mode,
    followed_checkpoints,
    native_operators,
    onednn,
    refused_seeding,
    values_given,
)
from poetmodel.torch.capturing.values import FiniteChecks, KnownValues, ValueGuards, is_unknown
from poetmodel.torch.errors import RAISED, explained
from poetmodel.torch.graph.tensors import tensors_in
from poetmodel.torch.int8.reading import with_fronts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import fx

    from poetmodel.torch.capturing.inputs import Inputs

_LOG: Final = logging.getLogger("poetmodel.torch.joint")

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
        In which a module that PT2E has quantized is a front in int8. Parameters, gradients,
        buffers and the state of random generators stay as they were.

    Raises
    ------
    CaptureError
        If the step cannot be captured: says which operation, where, and what to do.
    """
    name = name or type(model).__name__
    refuse(name, step_faults(model, loss_fn, inputs))
    model = with_fronts(model)
    flat, spec = flatten(inputs)
    by_name = takes_keywords(
        model, inputs if loss_fn is None or isinstance(inputs, Mapping) else inputs[:-1]
    )
    returned: list[OutputForm] | None = [] if isinstance(inputs, Mapping) else None
    checks = FiniteChecks()
    stepped, assigned = _with_loss(
        name, model, loss_fn, spec, by_name=by_name, returned=returned, checks=checks
    )
    attributes = Attributes(stepped)
    reads = PythonReads(stepped, loss_fn)
    changes = StateChanges(name, attributes, reads)
    draws = Draws(name, attributes)
    leftovers = Leftovers()

    def begin() -> None:
        # PyTorch runs the model several times; each time begins with what the first found.
        attributes.put_back(within=True)
        leftovers.forget()

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
            refused_seeding(),
            # The LSTM of oneDNN has a backward that cannot be captured.
            onednn(enabled=mkldnn and not has_lstm),
            native_operators(),
            rare_collections(),
        ):
            with draws.kept():
                _observe(stepped, flat, attributes, reads, changes)
            assigned.at_start = begin
            recorded = partial(annotated, stepped, trail, draws.check)
            export = partial(
                _exported, stepped, flat, recorded, checks, attributes, leftovers, mkldnn=mkldnn
            )
            while (exported := export()) is None or assigned.learn() or checks.learn(*exported):
                attributes.put_back()
            graph_module, values = exported
            draws.check()
    finally:
        assigned.at_start = None
        stale = attributes.put_back()
        leftovers.take_away()
    if leftovers.kept_by:
        _LOG.warning(
            "%s: forward keeps tensors outside of the model (%s), which a compiled step does not: "
            "what was there was put back",
            name,
            listed(sorted(leftovers.kept_by)),
        )
    if stale:
        _LOG.warning(
            "%s: forward sets %s, which a compiled step does not: the code of the model runs once, "
            "and the attribute was put back; to have it updated, make it a buffer "
            "(register_buffer) and assign it with .detach()",
            name,
            ", ".join(shown_path(f"{path}.{key}") for path, key in stale),
        )
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
        results=tuple(
            output_specs(name, graph_module, arguments, output, checked=bool(checks.lines))
        ),
        input_spec=spec,
        inputs=tuple(flat),
        read=ValueGuards(tuple(values.reads.values())),
        python=reads.guards(name, changes.alternatives),
        output=output,
        checked=tuple(checks.lines),
    )
    joint.python.use_constants([joint.value(a) for a in joint.of(InputKind.CONSTANT_TENSOR)])
    refuse(name, _faults(joint))
    changed = {result.target.target for result in joint.results if result.target is not None}
    unsteady = [shown_path(g.path) for g in joint.read.sources if g.path and g.path in changed]
    if unsteady:
        _LOG.warning(
            "%s: forward reads %s, which each step changes: once it reads something else, the step "
            "is refused, or compiled again (dynamic='retrace')",
            name,
            ", ".join(unsteady),
        )
    return joint


def _observe(
    stepped: torch.nn.Module,
    inputs: Sequence[Any],
    attributes: Attributes,
    reads: PythonReads,
    changes: StateChanges,
) -> None:
    """Run a forward pass of eager PyTorch, and record which Python values it reads.

    On copies of the inputs; all tensors, the random state and attributes are put back. Where it
    fails, the capture that follows says so.
    Raises `CaptureError` if each forward pass changes Python state.
    """
    written = WrittenTensors(stepped.buffers())

    def forward() -> None:
        random = torch.random.fork_rng(devices=[])
        with random, warnings.catch_warnings(action="ignore"), written:
            stepped(*apart(tuple(inputs)))

    def put_back() -> None:
        attributes.put_back()
        changes.put_back()
        written.put_back()

    try:
        with reads.recording(), suppress(*RAISED):
            forward()
        reads.places.forget_temporary()
        changes.check(forward, put_back)
    finally:
        put_back()


def _exported(
    stepped: torch.nn.Module,
    inputs: Sequence[Any],
    recorded: Callable[[], AbstractContextManager[None]],
    checks: FiniteChecks,
    attributes: Attributes,
    leftovers: Leftovers,
    *,
    mkldnn: bool,
) -> tuple[fx.GraphModule, KnownValues] | None:
    """Return the joint graph, and what is known of values; None where it takes another attempt.

    That is so where the code keeps what one forward pass makes for the next, and where a value is
    read that nobody knows: whether numbers are finite can be told after the step, and is looked out
    for from then on.
    """
    values = KnownValues()
    context = TracingContext(fake_mode(values, mkldnn=mkldnn))
    try:
        with (
            recorded(),
            followed_checkpoints(stepped),
            values_given(stepped, inputs, values),
            drawing(),
            ExitStack() as stack,
            tracing(context),
        ):
            exported = aot_export_joint_with_descriptors(stack, stepped, tuple(inputs))
    except RAISED as error:
        attributes.put_back()
        if leftovers.learn(error):
            return None
        if checks.on or not is_unknown(error):
            raise
        checks.on = True
        return None
    return exported.graph_module, values


def _with_loss(
    name: str,
    model: torch.nn.Module,
    loss_fn: Callable[..., torch.Tensor] | None,
    form: Any,
    *,
    by_name: bool,
    returned: list[OutputForm] | None,
    checks: FiniteChecks,
) -> tuple[torch.nn.Module, AssignedBuffers]:
    """Return a module from flat inputs to the loss; it holds the user's modules, not copies.

    Where a list is given, the module returns the loss and, detached, the other tensors that the
    model returns; their form goes to the list. The last result is that of `checks`, if any.
    """

    class FlatModule(torch.nn.Module):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.add_module(BODY, model)
            if isinstance(loss_fn, torch.nn.Module):
                self.add_module(LOSS, loss_fn)
            self.training = model.training

        def forward(self, *flat: Any) -> Any:
            with assigned.around(), checks.watching():
                inputs = unflatten(flat, form)
                given = inputs if loss_fn is None else inputs[:-1]
                output = model(**given[0]) if by_name else model(*given)
                loss = loss_in(name, output if loss_fn is None else loss_fn(output, inputs[-1]))
                answers = checks.results()
                if returned is None:
                    return (loss, *answers) if answers else loss
                output_form, others = OutputForm.of(output, loss)
                returned[:] = [output_form]
                return (loss, *(tensor.detach() for tensor in others), *answers)

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
    """Return the fault of an operation that takes a random generator, or another object."""
    return (
        f"{user.target}{in_module(user)} takes a {kind}, which cannot be replayed; leave it out "
        "(random numbers come from the default generator)"
    )
