"""Tracing: a module, its loss and inputs become a training graph, and what of it is scheduled.

Half of the tensors of a training step are smaller than a page. They are kept for as long as
anything may read them, their sum is reserved from the budget, and the solver sees only the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final

from poetmodel.graph import Graph, Node, Phase, checkpoint_all_peak_bytes, floor
from poetmodel.plan import Instruction, Op
from poetmodel.torch.capturing.inputs import empty_faults, refuse
from poetmodel.torch.capturing.joint import capture
from poetmodel.torch.capturing.joint_graph import InputKind, Joint
from poetmodel.torch.errors import CaptureError
from poetmodel.torch.graph.operators import is_counted
from poetmodel.torch.graph.tensors import storage_key
from poetmodel.torch.step.captured import CapturedGraph
from poetmodel.torch.step.training import TrainingGraph
from poetmodel.torch.step.updates import Update, with_optimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    import torch

    from poetmodel.device import Costs
    from poetmodel.plan import Program
    from poetmodel.torch.capturing.inputs import Inputs
    from poetmodel.torch.graph.profiles import OpProfile
    from poetmodel.torch.graph.step_graph import Operation


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A training step as PyTorch captured it, and as the training graph that is scheduled.

    Node ``k`` of the graph is ``operations[k]``, tensor ``i`` is ``storages[i]``.
    """

    joint: Joint
    parts: CapturedGraph
    graph: Graph

    @cached_property
    def held_bytes(self) -> int:
        """Bytes of the results that are handed out only at the end of the step: loss, buffers [B].

        The graph frees them after their last reader; whoever runs a plan holds them until the end,
        so a budget has to leave room for them.
        """
        held = {i for e in self.parts.outputs if e.held for i in e.reads.storages}
        return sum(self.parts.storages[index].bytes for index in held)


def trace(
    model: torch.nn.Module,
    loss_fn: Callable[..., torch.Tensor] | None,
    inputs: Inputs,
    *,
    name: str | None = None,
    measure_workspace: bool = True,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    clip_grad_norm: float | None = None,
) -> Trace:
    """Trace a training step.

    Parameters
    ----------
    model, loss_fn, inputs
        As for `compile`; the first dimension of the first input is the batch size.
    name : str, optional
        Name of the graph; by default the class of `model`.
    measure_workspace : bool
        Whether to measure the memory that operations need beside their outputs.
    optimizer : torch.optim.Optimizer or sequence of them, optional
        Make its step a part of the graph: SGD, Adam, AdamW, NAdam, RMSprop, Adagrad, Adamax, RAdam
        or Muon. Parameters, moments and buffers are then state tensors, each parameter has an
        update at its place, operators may run in place, and batch and learning rate are inputs.
        Without it the graph ends with the gradients.
    clip_grad_norm : float, optional
        Clip the norm of all gradients together, as ``torch.nn.utils.clip_grad_norm_`` does with
        ``model.parameters()``: all updates wait for it. Needs an `optimizer`.

    Returns
    -------
    Trace
        Parameters, gradients, buffers and the state of random generators stay as they were.

    Raises
    ------
    CaptureError
        If the step cannot be captured: says which operation, where, and what to do.
    """
    if isinstance(inputs, tuple | list | Mapping):
        refuse(name or type(model).__name__, empty_faults(inputs))
    joint = captured_step(
        model, loss_fn, inputs, name=name, optimizer=optimizer, clip_grad_norm=clip_grad_norm
    )
    return trace_of(joint, captured_graph(joint, measured=measure_workspace))


def captured_step(
    model: torch.nn.Module,
    loss_fn: Callable[..., torch.Tensor] | None,
    inputs: Inputs,
    *,
    name: str | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    clip_grad_norm: float | None = None,
) -> Joint:
    """Capture a step, with the updates of an optimizer where one is given."""
    joint = capture(model, loss_fn, inputs, name=name)
    if clip_grad_norm is not None and optimizer is None:
        raise CaptureError(f"{joint.name}: clip_grad_norm: needs an optimizer; give optimizer=")
    if optimizer is not None:
        joint = with_optimizer(joint, optimizer, clip_grad_norm=clip_grad_norm)
    return joint


def captured_graph(
    joint: Joint, *, known: Mapping[int, OpProfile] | None = None, measured: bool = True
) -> CapturedGraph:
    """Return the operations of a captured step: by running it, or from what is known of such a run.

    On the ``meta`` device nothing is computed, and no workspace measured.
    """
    kind = CapturedGraph if joint.optimizer is None else TrainingGraph
    meta = any(joint.value(a).is_meta for a in joint.of(InputKind.PARAMETER))
    return kind(joint, known=known, measured=measured and not meta)


def trace_of(joint: Joint, parts: CapturedGraph) -> Trace:
    """Return the trace of a captured step."""
    return Trace(joint=joint, parts=parts, graph=_graph(joint, parts))


def _graph(joint: Joint, parts: CapturedGraph) -> Graph:
    nodes = tuple(_node(parts, operation) for operation in parts.operations)
    forward = [operation for operation in parts.operations if operation.phase is Phase.FORWARD]
    counted = sum(operation.profile.flops for operation in forward if is_counted(operation.node))
    trained = _distinct(
        tensor for tensor in map(joint.value, joint.of(InputKind.PARAMETER)) if tensor.requires_grad
    )
    first = next((value for value in joint.inputs if getattr(value, "ndim", 0)), None)
    return Graph(
        name=joint.name,
        nodes=nodes,
        batch_size=1 if first is None else max(1, int(first.shape[0])),
        dtype=str(joint.value(joint.of(InputKind.PARAMETER)[0]).dtype).removeprefix("torch."),
        resident_bytes=_resident_bytes(joint, trained) if joint.optimizer is None else {},
        parameters=sum(tensor.numel() for tensor in trained),
        forward_macs=counted // 2,
        kernels="pytorch",
    )


def _node(parts: CapturedGraph, operation: Operation) -> Node:
    """Return the node of an operation; an update needs what it says, and a source nothing."""
    workspace_bytes, moved = operation.profile.workspace_bytes, operation.profile.moved_bytes
    if isinstance(parts, TrainingGraph) and isinstance(operation.node.target, Update):
        workspace_bytes = parts.update_workspace_bytes(operation)
    return parts.node(
        operation,
        workspace_bytes=workspace_bytes,
        # A batch is given once; state is updated once.
        recomputable=operation.phase not in (Phase.INPUT, Phase.STATE, Phase.UPDATE),
        bytes_moved=None if operation.phase is Phase.STATE else moved,
    )


def _resident_bytes(joint: Joint, trained: Sequence[torch.Tensor]) -> dict[str, int]:
    """Return the tensors in memory for the whole step.

    ``parameters`` are all that the step finds in place: parameters, frozen ones too, buffers and
    constants, but not the inputs, which belong to the caller. ``gradients`` are those of
    parameters: a new gradient is added to them and let go as soon as it is computed.
    """
    there = _distinct(
        joint.value(argument)
        for argument in joint.arguments
        if argument.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
    )
    return {
        "parameters": sum(tensor.untyped_storage().nbytes() for tensor in there),
        "gradients": sum(tensor.numel() * tensor.element_size() for tensor in trained),
    }


def _distinct(tensors: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the tensors that do not share their storage with an earlier one."""
    return tuple({storage_key(tensor): tensor for tensor in tensors}.values())


# -- what is scheduled --------------------------------------------------------------------------

KEPT_SHARES: Final = (0.01, 0.001, 0.0)
"""Small tensors are kept as long as they are together no more than this share of the budget; the
next share is tried where too little is left beside what is kept."""

MOST_OF_ROOM: Final = 1 / 3
"""Greatest share for kept tensors of the part of a budget above the least one."""

LEAST_HOME_BYTES: Final = 4096
"""State of fewer bytes, less than a page, has its home in RAM always [B]."""

RANDOM_STATE_BYTES: Final = 5056
"""Size of the state of PyTorch's random generator of the processor [B]."""

_STATE: Final = "parameters, buffers, and what the optimizer keeps"
_SMALL_STATE: Final = "small parameters, buffers, and what the optimizer keeps of them,"
_INPUTS: Final = "inputs"
_RESULTS: Final = "results that wait for the end of the step"


@dataclass(frozen=True, kw_only=True)
class ScheduledGraph:
    """The training graph that is solved: nodes of the trace, and its larger tensors."""

    graph: Graph
    numbers: tuple[int, ...]
    """Storage number of each tensor of `graph`."""
    operations: tuple[int, ...]
    """Number of the operation that each node of `graph` is."""
    threshold_bytes: int
    """Storages of fewer bytes are always kept [B]."""
    reserves: tuple[tuple[str, int], ...]
    """Uncounted needs of a step: the purpose of each, and its bytes [B]."""

    @property
    def reserved_bytes(self) -> int:
        """The sum of `reserves` [B]."""
        return sum(size for _, size in self.reserves)

    def in_operations(self, program: Program) -> Program:
        """Return a program of `graph` in operations; storages go by their place in `numbers`."""
        return tuple(
            Instruction(op, self.operations[index] if op == Op.COMPUTE else index)
            for op, index in program
        )


def keep_all_bytes(trace: Trace) -> int:
    """Return the peak when everything is kept; 100 % of a budget [B].

    Tensors, workspaces, and the results that wait for the end of the step; where updates are part
    of the step, state and inputs too.
    """
    whole = checkpoint_all_peak_bytes(_run(trace)[0])
    return whole + _held_bytes(trace, 0) + there_bytes(trace)


def scheduled_graph(trace: Trace, *, budget_bytes: int, homes: bool = False) -> ScheduledGraph:
    """Leave as many small tensors out as a budget allows.

    Of a budget close to the floor less is reserved, so that most of the room above it is left for
    schedules; with room for everything there is nothing to decide, and nothing is left out. With
    `homes` those of state are decided too, where not everything has room.
    """
    if budget_bytes >= keep_all_bytes(trace):
        whole = coarsen(trace, kept_bytes=-1)  # not even tensors of 0 bytes
        return replace(
            whole, reserves=(*_always_resident(trace), (_RESULTS, _held_bytes(trace, 0)))
        )
    candidates = [
        coarsen(trace, kept_bytes=int(share * budget_bytes), homes=homes) for share in KEPT_SHARES
    ]
    least = min(candidates, key=floor_bytes)
    room_bytes = MOST_OF_ROOM * (budget_bytes - floor_bytes(least))
    enough = (
        scheduled
        for scheduled in candidates
        if floor_bytes(scheduled) - floor_bytes(least) <= room_bytes
    )
    return next(enough, least)


def floor_bytes(scheduled: ScheduledGraph) -> int:
    """Return the least budget with which a schedule may be found [B]."""
    return floor(scheduled.graph).bytes + scheduled.reserved_bytes


def least_bytes(trace: Trace, *, homes: bool = False) -> int:
    """Return the least budget with which `scheduled_graph` leaves room for a schedule [B]."""
    return min(floor_bytes(coarsen(trace, kept_bytes=0, homes=homes)), keep_all_bytes(trace))


def coarsen(trace: Trace, *, kept_bytes: int, homes: bool = False) -> ScheduledGraph:
    """Leave the smallest tensors of a traced step to be kept always, at most so many bytes.

    The graph has the same nodes; kept tensors are neither inputs nor outputs of any. What of them
    an operation makes again when it is recomputed counts as its workspace. State is in RAM
    throughout, and only stands for what must not be computed after an update. With `homes` that
    holds of small state; where the rest has its home is to be decided.
    """
    storages = trace.parts.storages
    graph, operations = _run(trace)
    state = {graph.tensors[i].name for i in graph.state_tensors}
    state |= {graph.tensors[i].name for i in graph.state_of}
    computed = [trace.graph.tensor_index[t.name] for t in graph.tensors if t.name not in state]
    movable = _movable(trace) if homes else ()
    threshold = _threshold([storages[index].bytes for index in (*computed, *movable)], kept_bytes)
    free = frozenset(index for index in movable if storages[index].bytes >= threshold)
    if free:
        graph, operations = _run(trace, free)
    small = [index for index in computed if storages[index].bytes < threshold]
    if small:
        names = graph.tensor_index.keys() - {storages[index].name for index in small}
        graph = replace(graph, nodes=tuple(_without(node, names) for node in graph.nodes))
    numbers = tuple(trace.graph.tensor_index[tensor.name] for tensor in graph.tensors)
    random = sum(operation.is_random for operation in trace.parts.operations)
    # What recomputations may restore, and the state meanwhile.
    states_bytes = (random + 1) * RANDOM_STATE_BYTES if random else 0
    return ScheduledGraph(
        graph=graph,
        numbers=numbers,
        operations=operations,
        threshold_bytes=threshold,
        reserves=(
            *_always_resident(trace, free),
            (
                f"tensors of less than {threshold:,} B, which are always kept,",
                sum(storages[index].bytes for index in small),
            ),
            (_RESULTS, _held_bytes(trace, threshold)),
            ("states of the random generator", states_bytes),
        ),
    )


def _movable(trace: Trace) -> tuple[int, ...]:
    """Return the state that may have its home on storage: what the step finds in place, not small.

    Constants belong to the program, and whoever made them holds them.
    """
    if trace.joint.optimizer is None:
        return ()
    kinds = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.MOMENT)
    nodes = {argument.node for argument in trace.joint.arguments if argument.kind in kinds}
    storages = (trace.parts.storages[i] for i in trace.graph.state_tensors)
    return tuple(
        storage.index
        for storage in storages
        if trace.parts.operations[storage.operation].node in nodes
        and storage.bytes >= LEAST_HOME_BYTES
    )


def _run(trace: Trace, free: Collection[int] = ()) -> tuple[Graph, tuple[int, ...]]:
    """Return the graph of what a run decides about, and the operation of each of its nodes.

    Inputs belong to the caller, and state is in RAM throughout but what is `free`. Of the rest only
    what is updated and what operations read that could be computed again is left, without bytes.
    """
    graph = trace.graph
    if graph.version == 1:
        return graph, tuple(range(len(graph.nodes)))
    names = [tensor.name for tensor in graph.tensors]
    kept, weightless = set(names), set()
    for i, k in enumerate(graph.node_of):
        if trace.parts.operations[k].is_source and i not in free:
            new = graph.replacement_of.get(i)
            both = {names[i]} if new is None else {names[i], names[new]}
            if new is not None and any(graph.nodes[u].recomputable for u in graph.users_of[i]):
                weightless |= both
            else:
                kept -= both
    pairs = [(k, _without(node, kept, weightless)) for k, node in enumerate(graph.nodes)]
    left = [
        (k, node) for k, node in pairs if node.outputs or not trace.parts.operations[k].is_source
    ]
    return replace(graph, nodes=tuple(node for _, node in left)), tuple(k for k, _ in left)


def _always_resident(trace: Trace, free: Collection[int] = ()) -> tuple[tuple[str, int], ...]:
    """Return the tensors in RAM throughout a step with updates, and their size [B]."""
    graph = trace.graph
    inputs = [node.output_bytes for node in graph.nodes if node.phase == Phase.INPUT]
    if graph.version == 1:
        return ()
    state_bytes = graph.state_bytes - sum(graph.tensor_bytes[i] for i in free)
    return ((_SMALL_STATE if free else _STATE, state_bytes), (_INPUTS, sum(inputs)))


def there_bytes(trace: Trace) -> int:
    """Return the size of all that is in RAM throughout: 0 for a step without updates [B]."""
    return sum(size for _, size in _always_resident(trace))


def scheduled_costs(costs: Costs, graph: Graph) -> Costs:
    """Leave out the costs of what is kept."""
    if len(costs.compute) > len(graph.nodes) - len(graph.state_tensors):
        computed = (node.name for node in graph.nodes if not node.is_state)
        costs = replace(costs, compute={name: costs.compute[name] for name in computed})
    if costs.pages is None:
        return costs
    return replace(costs, pages={tensor.name: costs.pages[tensor.name] for tensor in graph.tensors})


def _threshold(sizes: list[int], kept_bytes: int) -> int:
    """Return the size from which on tensors are scheduled; equal ones are treated alike [B]."""
    total = threshold = 0
    for size in sorted(set(sizes)):
        total += size * sizes.count(size)
        if total > kept_bytes:
            break
        threshold = size + 1
    return threshold


def _without(node: Node, names: Collection[str], weightless: Collection[str] = ()) -> Node:
    """Return a node that reads and makes some tensors only; what else it makes is workspace."""
    left_out = [t for t in node.outputs if t.name not in names and t.replaces is None]
    small = 0 if node.phase in (Phase.STATE, Phase.INPUT) else sum(t.bytes for t in left_out)
    return replace(
        node,
        inputs=tuple(name for name in node.inputs if name in names),
        outputs=tuple(
            replace(tensor, bytes=0) if tensor.name in weightless else tensor
            for tensor in node.outputs
            if tensor.name in names
        ),
        workspace_bytes=node.workspace_bytes + small,
        in_place=tuple(pair for pair in node.in_place if set(pair) <= set(names)),
    )


def _held_bytes(trace: Trace, threshold: int) -> int:
    """Return the size of the copies of results that wait for the end of the step [B].

    Results in kept storages wait there; of others a copy is made, so that a loss does not hold
    the memory that it is a small part of. Sums of gradients of one weight in several places wait
    too, and the state of the random generator before the step.
    """
    storages = trace.parts.storages
    places: dict[int, list[int]] = {}
    total = (
        RANDOM_STATE_BYTES
        if any(operation.is_random for operation in trace.parts.operations)
        else 0
    )
    for output in trace.parts.outputs:
        example = output.result.node.meta["val"]
        size = example.numel() * example.element_size()
        target = output.result.target
        if not output.held and target is not None:
            places.setdefault(id(trace.joint.value(target)), []).append(size)
        elif all(storages[i].bytes >= threshold for i in output.reads.storages):
            total += size
    return total + sum(sizes[0] for sizes in places.values() if len(sizes) > 1)
