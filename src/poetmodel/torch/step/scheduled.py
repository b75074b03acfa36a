"""The graph to be solved: a traced step without its small tensors.

Half of the tensors of a training step are smaller than a page. The smallest ones, up to a fraction
of the budget, stay in RAM until their last possible reader. Their total size is reserved from the
budget, and the solver decides only on larger tensors.
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


SMALL_TENSOR_FRACTIONS: Final = (0.01, 0.001, 0.0)
"""Fractions of the budget that the omitted small tensors may take in total. The next fraction is
tried if they raise the minimum by more than `MAX_HEADROOM_FRACTION` of the headroom."""

MAX_HEADROOM_FRACTION: Final = 1 / 3
"""Largest fraction of the budget's headroom above the minimum that small tensors may take."""

MIN_MOVABLE_BYTES: Final = 4096
"""State with fewer bytes, less than a page, always has its home in RAM [B]."""

RANDOM_STATE_BYTES: Final = 5056
"""Size of the state of PyTorch's CPU random generator [B]."""

_STATE: Final = "parameters, buffers, and optimizer state"
_SMALL_STATE: Final = "small parameters, buffers, and optimizer state"
_INPUTS: Final = "inputs"
_RESULTS: Final = "results that are returned at the end of the step"


@dataclass(frozen=True, kw_only=True)
class ScheduledGraph:
    """The training graph to be solved: nodes of the trace and its larger tensors.

    State and inputs that are always in RAM are omitted or have 0 bytes.
    """

    graph: Graph
    storage_indices: tuple[int, ...]
    """Storage index of each tensor of `graph`."""
    operations: tuple[int, ...]
    """Operation index of each node of `graph`."""
    threshold_bytes: int
    """Storages with fewer bytes are always kept [B]."""
    reserves: tuple[tuple[str, int], ...]
    """RAM that the graph does not count, as (description, bytes) of each item [B]."""

    @property
    def reserved_bytes(self) -> int:
        """The sum of `reserves` [B]."""
        return sum(size for _, size in self.reserves)

    def to_operations(self, program: Program) -> Program:
        """Return a program with operation indices instead of node indices; tensor indices stay."""
        return tuple(
            Instruction(op, self.operations[index] if op == Op.COMPUTE else index)
            for op, index in program
        )


def keep_all_bytes(trace: Trace) -> int:
    """Return the keep-all peak, 100 % of a budget, with state and inputs of updates [B]."""
    graph_bytes = checkpoint_all_peak_bytes(_decision_graph(trace)[0])
    return graph_bytes + _result_copies_bytes(trace, 0) + always_resident_bytes(trace)


def build_scheduled_graph(
    trace: Trace, *, budget_bytes: int, decide_homes: bool = False
) -> ScheduledGraph:
    """Return the graph to be solved, without small tensors.

    They take the largest of `SMALL_TENSOR_FRACTIONS` of the budget that raises `floor_bytes` by at
    most `MAX_HEADROOM_FRACTION` of the headroom. With `decide_homes`, below keep-all, the homes of
    larger state are decisions.
    """
    if budget_bytes >= keep_all_bytes(trace):
        full_graph = coarsen(trace, kept_bytes=-1)  # omits no tensor, not even those of 0 bytes
        return replace(
            full_graph,
            reserves=(*_resident_reserves(trace), (_RESULTS, _result_copies_bytes(trace, 0))),
        )
    candidates = [
        coarsen(trace, kept_bytes=int(fraction * budget_bytes), decide_homes=decide_homes)
        for fraction in SMALL_TENSOR_FRACTIONS
    ]
    smallest_graph = min(candidates, key=floor_bytes)
    headroom_bytes = MAX_HEADROOM_FRACTION * (budget_bytes - floor_bytes(smallest_graph))
    fitting_graphs = (
        scheduled
        for scheduled in candidates
        if floor_bytes(scheduled) - floor_bytes(smallest_graph) <= headroom_bytes
    )
    return next(fitting_graphs, smallest_graph)


def floor_bytes(scheduled: ScheduledGraph) -> int:
    """Return a graph's minimum RAM plus reserved bytes: no smaller budget has a schedule [B]."""
    return floor(scheduled.graph).bytes + scheduled.reserved_bytes


def min_budget_bytes(trace: Trace, *, decide_homes: bool = False) -> int:
    """Return the smallest budget that may have a schedule, at most `keep_all_bytes` [B]."""
    return min(
        floor_bytes(coarsen(trace, kept_bytes=0, decide_homes=decide_homes)), keep_all_bytes(trace)
    )


def coarsen(trace: Trace, *, kept_bytes: int, decide_homes: bool = False) -> ScheduledGraph:
    """Return the graph without its smallest computed tensors, of at most `kept_bytes` in total.

    Omitted tensors are always kept, and `reserves` counts them; their nodes also count them as
    workspace, because a recomputation writes them again. Tensors of equal size are omitted all or
    not at all; none if `kept_bytes` is negative. With `decide_homes`, the homes of state are
    decisions, too, except of constants and of state below `MIN_MOVABLE_BYTES` or the threshold,
    which is always in RAM. State below the threshold then counts in `kept_bytes`.
    """
    storages = trace.step_graph.storages
    graph, operations = _decision_graph(trace)
    state = {graph.tensors[i].name for i in graph.state_tensors}
    state |= {graph.tensors[i].name for i in graph.state_of}
    computed_tensors = [
        trace.graph.tensor_index[t.name] for t in graph.tensors if t.name not in state
    ]
    movable_candidates = _movable_state(trace) if decide_homes else ()
    threshold = _size_threshold(
        [storages[index].bytes for index in (*computed_tensors, *movable_candidates)], kept_bytes
    )
    movable = frozenset(index for index in movable_candidates if storages[index].bytes >= threshold)
    if movable:
        graph, operations = _decision_graph(trace, movable)
    small_tensors = [index for index in computed_tensors if storages[index].bytes < threshold]
    if small_tensors:
        retained_names = graph.tensor_index.keys() - {
            storages[index].name for index in small_tensors
        }
        graph = replace(
            graph, nodes=tuple(_restrict_node(node, retained_names) for node in graph.nodes)
        )
    storage_indices = tuple(trace.graph.tensor_index[tensor.name] for tensor in graph.tensors)
    n_random = sum(operation.is_random for operation in trace.step_graph.operations)
    # One generator state per random operation for its recomputation, and one to restore after it.
    states_bytes = (n_random + 1) * RANDOM_STATE_BYTES if n_random else 0
    return ScheduledGraph(
        graph=graph,
        storage_indices=storage_indices,
        operations=operations,
        threshold_bytes=threshold,
        reserves=(
            *_resident_reserves(trace, movable),
            (
                f"tensors of less than {threshold:,} B, which are always kept",
                sum(storages[index].bytes for index in small_tensors),
            ),
            (_RESULTS, _result_copies_bytes(trace, threshold)),
            ("states of the random generator", states_bytes),
        ),
    )


def _movable_state(trace: Trace) -> tuple[int, ...]:
    """Return indices of state whose home may be on storage: no constants, no small tensors."""
    if trace.joint.optimizer is None:
        return ()
    kinds = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.MOMENT)
    nodes = {argument.node for argument in trace.joint.arguments if argument.kind in kinds}
    storages = (trace.step_graph.storages[i] for i in trace.graph.state_tensors)
    return tuple(
        storage.index
        for storage in storages
        if trace.step_graph.operations[storage.operation].node in nodes
        and storage.bytes >= MIN_MOVABLE_BYTES
    )


def _decision_graph(trace: Trace, movable: Collection[int] = ()) -> tuple[Graph, tuple[int, ...]]:
    """Return the graph of the tensors to decide on, and the operation index of each of its nodes.

    Omits inputs, and state that is not in `movable`, but no updates. State that a recomputable node
    reads and an update replaces stays with 0 bytes, to order them.
    """
    graph = trace.graph
    if graph.version == 1:  # a step without updates, whose graph has neither state nor inputs
        return graph, tuple(range(len(graph.nodes)))
    names = [tensor.name for tensor in graph.tensors]
    retained_names, zero_size_names = set(names), set()
    for i, k in enumerate(graph.node_of):
        if trace.step_graph.operations[k].is_source and i not in movable:
            replacement = graph.replacement_of.get(i)
            version_names = {names[i]} if replacement is None else {names[i], names[replacement]}
            if replacement is not None and any(
                graph.nodes[reader].recomputable for reader in graph.users_of[i]
            ):
                zero_size_names |= version_names
            else:
                retained_names -= version_names
    pairs = [
        (k, _restrict_node(node, retained_names, zero_size_names))
        for k, node in enumerate(graph.nodes)
    ]
    nodes = [
        (k, node)
        for k, node in pairs
        if node.outputs or not trace.step_graph.operations[k].is_source
    ]
    return replace(graph, nodes=tuple(node for _, node in nodes)), tuple(k for k, _ in nodes)


def _resident_reserves(trace: Trace, movable: Collection[int] = ()) -> tuple[tuple[str, int], ...]:
    """Return (description, bytes) of state not in `movable`, and of inputs.

    () for a step without updates, whose graph and budget count neither.
    """
    graph = trace.graph
    inputs_bytes = [node.output_bytes for node in graph.nodes if node.phase == Phase.INPUT]
    if graph.version == 1:
        return ()
    state_bytes = graph.state_bytes - sum(graph.tensor_bytes[i] for i in movable)
    return ((_SMALL_STATE if movable else _STATE, state_bytes), (_INPUTS, sum(inputs_bytes)))


def always_resident_bytes(trace: Trace) -> int:
    """Return the bytes of all state and inputs; 0 for a step without updates [B]."""
    return sum(size for _, size in _resident_reserves(trace))


def select_costs(costs: Costs, graph: Graph) -> Costs:
    """Return the costs of a whole step, restricted to names of nodes and tensors in `graph`."""
    if len(costs.compute) > len(graph.nodes) - len(graph.state_tensors):
        computed_names = (node.name for node in graph.nodes if not node.is_state)
        costs = replace(costs, compute={name: costs.compute[name] for name in computed_names})
    if costs.pages is None:
        return costs
    return replace(costs, pages={tensor.name: costs.pages[tensor.name] for tensor in graph.tensors})


def _size_threshold(sizes_bytes: list[int], kept_bytes: int) -> int:
    """Return the size below which tensors are kept, in total at most `kept_bytes` [B]."""
    total_bytes = threshold = 0
    for size in sorted(set(sizes_bytes)):
        total_bytes += size * sizes_bytes.count(size)
        if total_bytes > kept_bytes:
            break
        threshold = size + 1
    return threshold


def _restrict_node(
    node: Node, names: Collection[str], zero_size_names: Collection[str] = ()
) -> Node:
    """Return a node with only the tensors in `names`; `zero_size_names` get 0 bytes.

    Omitted outputs count as workspace, except state, inputs and replacements of state.
    """
    omitted_tensors = [t for t in node.outputs if t.name not in names and t.replaces is None]
    omitted_bytes = (
        0 if node.phase in (Phase.STATE, Phase.INPUT) else sum(t.bytes for t in omitted_tensors)
    )
    return replace(
        node,
        inputs=tuple(name for name in node.inputs if name in names),
        outputs=tuple(
            replace(tensor, bytes=0) if tensor.name in zero_size_names else tensor
            for tensor in node.outputs
            if tensor.name in names
        ),
        workspace_bytes=node.workspace_bytes + omitted_bytes,
        in_place=tuple(pair for pair in node.in_place if set(pair) <= set(names)),
    )


def _result_copies_bytes(trace: Trace, threshold_bytes: int) -> int:
    """Return the bytes of copies of the results that are returned at the end of the step [B].

    Results are copied, so that a loss does not keep a larger storage in RAM, except from storages
    below `threshold_bytes`. Includes sums of several gradients and the random state.
    """
    storages = trace.step_graph.storages
    gradient_sizes: dict[int, list[int]] = {}
    total_bytes = (
        RANDOM_STATE_BYTES
        if any(operation.is_random for operation in trace.step_graph.operations)
        else 0
    )
    for output in trace.step_graph.outputs:
        example = output.result.node.meta["val"]
        size = example.numel() * example.element_size()
        target = output.result.target
        if not output.is_returned_at_end and target is not None:
            gradient_sizes.setdefault(id(trace.joint.value(target)), []).append(size)
        elif all(storages[i].bytes >= threshold_bytes for i in output.reads.storages):
            total_bytes += size
    return total_bytes + sum(sizes[0] for sizes in gradient_sizes.values() if len(sizes) > 1)
