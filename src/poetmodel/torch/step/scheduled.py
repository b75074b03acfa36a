"""What of a traced step is scheduled: its larger tensors.

Half of the tensors of a training step are smaller than a page. They are kept for as long as
anything may read them, their sum is reserved from the budget, and the solver sees only the others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from poetmodel.graph import Graph, Node, Phase, checkpoint_all_peak_bytes, floor
from poetmodel.plan import Instruction, Op
from poetmodel.torch.capturing.joint_graph import InputKind

if TYPE_CHECKING:
    from collections.abc import Collection

    from poetmodel.device import Costs
    from poetmodel.plan import Program
    from poetmodel.torch.step.trace import Trace


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
