"""The graph to be solved: a traced step without the state and inputs that are always in RAM."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from poetmodel.graph import Graph, Node, Phase, checkpoint_all_peak_bytes, floor
from poetmodel.plan import Instruction, Op
from poetmodel.torch.capturing.joint_graph import InputKind

if TYPE_CHECKING:
    from collections.abc import Collection

    from poetmodel.device import Costs
    from poetmodel.plan import Plan, Program
    from poetmodel.torch.step.trace import Trace


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
    """The training graph to be solved: nodes of the trace and the tensors to decide on.

    State and inputs that are always in RAM are omitted or have 0 bytes.
    """

    graph: Graph
    storage_indices: tuple[int, ...]
    """Storage index of each tensor of `graph`."""
    operations: tuple[int, ...]
    """Operation index of each node of `graph`."""
    reserves: tuple[tuple[str, int], ...]
    """RAM that the graph does not count, as (description, bytes) of each item [B]."""

    @property
    def reserved_bytes(self) -> int:
        """The sum of `reserves` [B]."""
        return sum(size for _, size in self.reserves)

    def to_whole_plan(self, plan: Plan) -> WholePlan:
        """Return a plan of `graph` by the indices of the whole step."""
        resident = set(plan.resident or ())
        stored = [i for i in self.graph.state_tensors if i not in resident]
        replacement_of = self.graph.replacement_of
        stored += [replacement_of[i] for i in stored if i in replacement_of]
        return WholePlan(
            program=tuple(
                Instruction(op, (self.operations if op == Op.COMPUTE else self.storage_indices)[i])
                for op, i in plan.program
            ),
            storages=frozenset(self.storage_indices),
            stored_state=frozenset(self.storage_indices[i] for i in stored),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WholePlan:
    """A plan of a whole step."""

    program: Program
    """The instructions, by the indices of operations and storages."""
    storages: frozenset[int]
    """Indices of the storages that the program frees and pages; others are kept until their last
    reader."""
    stored_state: frozenset[int]
    """Indices of the storages of state with its home on storage, and of their replacements."""


def keep_all_bytes(trace: Trace) -> int:
    """Return the keep-all peak, 100 % of a budget, with state and inputs of updates [B]."""
    graph_bytes = checkpoint_all_peak_bytes(_decision_graph(trace)[0])
    return graph_bytes + _result_copies_bytes(trace) + always_resident_bytes(trace)


def build_scheduled_graph(
    trace: Trace, *, budget_bytes: int, decide_homes: bool = False
) -> ScheduledGraph:
    """Return the graph to be solved; below keep-all it reserves what recomputations need.

    With `decide_homes`, below keep-all, the homes of state are decisions, except of constants and
    of state below `MIN_MOVABLE_BYTES`, which is always in RAM.
    """
    is_below = budget_bytes < keep_all_bytes(trace)
    movable = _movable_state(trace) if decide_homes and is_below else frozenset()
    graph, operations = _decision_graph(trace, movable)
    n_random = sum(operation.is_random for operation in trace.step_graph.operations)
    # One generator state per random operation for its recomputation, and one to restore after it.
    states_bytes = (n_random + 1) * RANDOM_STATE_BYTES if n_random and is_below else 0
    return ScheduledGraph(
        graph=graph,
        storage_indices=tuple(trace.graph.tensor_index[tensor.name] for tensor in graph.tensors),
        operations=operations,
        reserves=(
            *_resident_reserves(trace, movable),
            (_RESULTS, _result_copies_bytes(trace)),
            ("states of the random generator", states_bytes),
        ),
    )


def floor_bytes(scheduled: ScheduledGraph) -> int:
    """Return a graph's minimum RAM plus reserved bytes: no smaller budget has a schedule [B]."""
    return floor(scheduled.graph).bytes + scheduled.reserved_bytes


def min_budget_bytes(trace: Trace, *, decide_homes: bool = False) -> int:
    """Return the smallest budget that may have a schedule, at most `keep_all_bytes` [B]."""
    graph = build_scheduled_graph(trace, budget_bytes=0, decide_homes=decide_homes)
    return min(floor_bytes(graph), keep_all_bytes(trace))


def _movable_state(trace: Trace) -> frozenset[int]:
    """Return indices of state whose home may be on storage: no constants, no small tensors."""
    if trace.joint.optimizer is None:
        return frozenset()
    kinds = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.MOMENT)
    nodes = {argument.node for argument in trace.joint.arguments if argument.kind in kinds}
    storages = (trace.step_graph.storages[i] for i in trace.graph.state_tensors)
    return frozenset(
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


def _restrict_node(
    node: Node, names: Collection[str], zero_size_names: Collection[str] = ()
) -> Node:
    """Return a node with only the tensors in `names`; `zero_size_names` get 0 bytes."""
    return replace(
        node,
        inputs=tuple(name for name in node.inputs if name in names),
        outputs=tuple(
            replace(tensor, bytes=0) if tensor.name in zero_size_names else tensor
            for tensor in node.outputs
            if tensor.name in names
        ),
        in_place=tuple(pair for pair in node.in_place if set(pair) <= set(names)),
    )


def _result_copies_bytes(trace: Trace) -> int:
    """Return the bytes of copies of the results that are returned at the end of the step [B].

    Results are copied, so that a loss does not keep a larger storage in RAM. Includes sums of
    several gradients and the random state.
    """
    gradient_sizes: dict[int, list[int]] = {}
    total_bytes = (
        RANDOM_STATE_BYTES
        if any(operation.is_random for operation in trace.step_graph.operations)
        else 0
    )
    for output in trace.outputs:
        example = output.result.node.meta["val"]
        size = example.numel() * example.element_size()
        target = output.result.target
        if not output.is_returned_at_end and target is not None:
            gradient_sizes.setdefault(id(trace.joint.value(target)), []).append(size)
        else:
            total_bytes += size
    return total_bytes + sum(sizes[0] for sizes in gradient_sizes.values() if len(sizes) > 1)
