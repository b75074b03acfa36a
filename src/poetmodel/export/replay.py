"""Latent replay: samples stored as the outputs of a frozen front, and training steps on them.

A stored sample consists of the tensors that nodes after the front read, or that the step returns:
outputs of the front, and inputs such as labels. A step on a stored sample executes the program of
the whole step without the nodes of the front, at the same addresses, so its results have the same
bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple

from poetmodel.errors import InputError, join_names, suggest_names
from poetmodel.lowered.identity import front_identity
from poetmodel.lowered.kernels import find_kernel
from poetmodel.plan import Op
from poetmodel.plan.arena_check import check_arena
from poetmodel.schedule.machine import Content

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from poetmodel.device.generation import GenerationLayout
    from poetmodel.lowered.step import LoweredStep
    from poetmodel.plan import Plan
    from poetmodel.plan.arena import Arena

MAX_SAMPLES: Final = 65_534
"""Maximum number of stored samples: indices of groups have 16 bits, and 65,535 means no group."""
HEADER_BYTES: Final = 32
"""Size of the header of a group [B], see ``src/pm_groups.h``."""
CHECKSUM_BYTES: Final = 4
"""Size of the checksum of a sample [B]."""
CHUNK_BYTES: Final = 64
"""Size of one write to a group, unless the storage has larger write units [B]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """A prefix of the frozen nodes of a step (see `find_front`), and the tensors of a sample."""

    nodes: frozenset[int]
    """Indices of the nodes of the front."""
    outputs: tuple[str, ...]
    """Tensors of the front that nodes outside of it read or the step returns.

    They are in the order of the graph; `order_outputs` sorts them by their first computation."""
    inputs: tuple[int, ...]
    """Indices of the inputs that nodes outside of the front read or the step returns."""

    def identify(self, step: LoweredStep) -> str:
        """Return the `front_identity`."""
        return front_identity(step, nodes=self.nodes, outputs=self.outputs, inputs=self.inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Storage for samples, in groups that are each written as a whole."""

    max_samples: int
    """Maximum number of stored samples."""
    front: Front
    tensor_bytes: tuple[int, ...]
    """Sizes of the tensors of a sample: outputs of the front, then inputs [B]."""
    layout: GenerationLayout
    """Write units and erase blocks of the storage."""

    @property
    def sample_bytes(self) -> int:
        """Storage of a sample in its group: tensors in whole words, and a checksum [B]."""
        return sum(-(-size // 4) * 4 for size in self.tensor_bytes) + CHECKSUM_BYTES

    @property
    def chunk_bytes(self) -> int:
        """Maximum size of one write to a group; its seal has a separate chunk [B]."""
        return max(CHUNK_BYTES, self.layout.write_unit_bytes)

    @property
    def samples_per_group(self) -> int:
        """Number of samples of a group: as many as fit one erase block, or 1."""
        free_bytes = self.layout.erase_block_bytes - HEADER_BYTES - 2 * self.chunk_bytes
        return max(1, free_bytes // self.sample_bytes)

    @property
    def group_slots(self) -> int:
        """Number of slots for groups: one more than the maximum number of groups.

        A new version of a group is written before the old version is erased.
        """
        return -(-self.max_samples // self.samples_per_group) + 1

    @property
    def group_bytes(self) -> int:
        """Storage of a group, in whole erase blocks [B]."""
        chunk, block = self.chunk_bytes, self.layout.erase_block_bytes
        content_bytes = HEADER_BYTES + self.samples_per_group * self.sample_bytes
        return -(-(-(-content_bytes // chunk) * chunk + chunk) // block) * block

    @property
    def stored_bytes(self) -> int:
        """Storage of all slots for groups [B]."""
        return self.group_slots * self.group_bytes

    @property
    def input_bytes(self) -> int:
        """RAM of the inputs of a stored sample, each in whole words [B]."""
        return sum(-(-size // 4) * 4 for size in self.tensor_bytes[len(self.front.outputs) :])

    @property
    def ram_bytes(self) -> int:
        """Additional RAM: inputs of a sample, a chunk, 2 B per group slot, in whole words [B]."""
        return self.input_bytes + self.chunk_bytes + 2 * self.group_slots + 2 * self.group_slots % 4


def check_samples(samples: int) -> None:
    """Raise `InputError` unless `samples` is 0 (no replay) or a valid number of stored samples."""
    if type(samples) is not int or not 0 <= samples <= MAX_SAMPLES:
        raise InputError(
            f"replay: expected a number of samples from 1 to {MAX_SAMPLES:,}, got {samples!r}"
        )


def create_replay(
    step: LoweredStep, samples: int, layout: GenerationLayout, *, cut: str | None = None
) -> Replay:
    """Return the storage for at most `samples` samples of a step, with the front of `find_front`.

    `layout` has the write units and erase blocks of the storage. Raises `InputError` if the step
    has no optimizer, or no frozen front.
    """
    if step.learning_rate is None:
        raise InputError(
            f"replay: {step.graph.name} has no optimizer, so no step updates parameters; "
            "compile it with one"
        )
    front = find_front(step, cut)
    if front is None:
        raise InputError(
            f"replay: {step.graph.name} has no frozen front: its first layers train, draw random "
            "numbers, change running statistics, or read a tensor that is computed from no input, "
            "such as by torch.arange; freeze them (requires_grad_(False), eval() for batch norm), "
            "quantize them, or store such a tensor in a buffer"
        )
    tensor_bytes = _tensor_bytes(step, front)
    return Replay(max_samples=samples, front=front, tensor_bytes=tensor_bytes, layout=layout)


def _tensor_bytes(step: LoweredStep, front: Front) -> tuple[int, ...]:
    sizes = [step.buffers[name].bytes for name in front.outputs]
    sizes += [step.buffers[step.inputs[k].pieces[0].buffer].bytes for k in front.inputs]
    return tuple(sizes)


def order_outputs(replay: Replay, step: LoweredStep, plan: Plan) -> Replay:
    """Return `replay` with the outputs of its front in the order of their first computation."""
    first_computation: dict[int, int] = {}
    for position, (op, k) in enumerate(plan.program):
        if op == Op.COMPUTE:
            first_computation.setdefault(k, position)
    graph, front = step.graph, replay.front
    sort_keys = {
        name: (first_computation[graph.node_of[graph.tensor_index[name]]], index)
        for index, name in enumerate(front.outputs)
    }
    outputs = tuple(sorted(front.outputs, key=sort_keys.__getitem__))
    sizes = [step.buffers[name].bytes for name in outputs]
    return replace(
        replay,
        front=replace(front, outputs=outputs),
        tensor_bytes=(*sizes, *replay.tensor_bytes[len(outputs) :]),
    )


def find_front(step: LoweredStep, cut: str | None = None) -> Front | None:
    """Return the front that ends with the node `cut`; by default that of the smallest samples.

    Of equally small samples, the front with most nodes; None if no front exists; `InputError` if
    none ends with `cut`. A front is a prefix of the frozen nodes; a sample has its outputs and the
    inputs that nodes outside read or the step returns. In tiles, a cut is behind the last piece.
    """
    fronts = list(_list_fronts(step))
    if cut is None or not fronts:
        return min(
            (front for _, front in fronts),
            key=lambda front: (sum(_tensor_bytes(step, front)), -len(front.nodes)),
            default=None,
        )
    front_by_name = {name.partition("[")[0]: front for name, front in fronts} | dict(fronts)
    if cut not in front_by_name:
        names = list(dict.fromkeys(name.partition("[")[0] for name, _ in fronts))
        guess = suggest_names(cut, names)
        raise InputError(
            f"replay_cut: {cut!r} is no frozen node behind which samples can be cut; expected one "
            f"of {join_names(names, max_names=20)}{guess and f'; {guess}'}"
        )
    return front_by_name[cut]


def _list_fronts(step: LoweredStep) -> Iterator[tuple[str, Front]]:
    """Yield (name of the last node, front) for prefixes of frozen nodes with outputs to store."""
    frozen_nodes = tuple(_find_frozen_nodes(step))
    input_index_of = {value.pieces[0].buffer: k for k, value in enumerate(step.inputs)}
    node_buffers = [{name for call in calls for name in call.buffers} for calls in step.calls]
    for count in range(1, len(frozen_nodes) + 1):
        front = _make_front(step, frozen_nodes[:count], node_buffers, input_index_of)
        if front.outputs:
            yield step.graph.nodes[frozen_nodes[count - 1]].name, front


class SampleCut(NamedTuple):
    """A node after which a step can be cut to store samples, with its storage and instructions."""

    node: str
    """The last node of the front."""
    sample_bytes: int
    stored_bytes: int
    """Storage of all samples [B]."""
    instructions: int
    """Estimated instructions of a step on a stored sample."""
    is_chosen: bool


def list_cuts(replay: Replay, step: LoweredStep, plan: Plan) -> tuple[SampleCut, ...]:
    """Return the Pareto-optimal cuts in bytes and instructions, and the chosen one, by size.

    Of cuts with equal bytes and instructions, the chosen one, otherwise the last one.
    """
    cuts: dict[tuple[int, int], SampleCut] = {}
    for node, front in _list_fronts(step):
        cut = _measure_cut(replay, step, plan, node, front)
        known = cuts.get((cut.sample_bytes, cut.instructions))
        if known is None or not known.is_chosen:
            cuts[cut.sample_bytes, cut.instructions] = cut
    best: list[SampleCut] = []
    for _, cut in sorted(cuts.items()):
        if cut.is_chosen or not best or cut.instructions < min(c.instructions for c in best):
            best.append(cut)
    return tuple(best)


def _measure_cut(
    replay: Replay, step: LoweredStep, plan: Plan, node: str, front: Front
) -> SampleCut:
    """Return the cut behind `front`, whose last node is `node`; `replay` has the chosen front."""
    storage = replace(replay, front=front, tensor_bytes=_tensor_bytes(step, front))
    return SampleCut(
        node=node,
        sample_bytes=storage.sample_bytes,
        stored_bytes=storage.stored_bytes,
        instructions=program_instructions(step, plan, front.nodes),
        is_chosen=front.nodes == replay.front.nodes,
    )


def _find_frozen_nodes(step: LoweredStep) -> Iterator[int]:
    """Yield the ascending indices of the nodes that read only inputs, frozen tensors and constants.

    Frozen tensors are outputs of nodes yielded before; frozen weights are constants. Omits random
    nodes, and nodes on constants alone, such as ``arange``.
    """
    input_buffers = {value.pieces[0].buffer for value in step.inputs}
    frozen_tensors: set[str] = set()
    for k, (node, calls) in enumerate(step.operations):
        is_random = any(find_kernel(call.kernel).is_random for call in calls)
        if node.is_state or is_random or not frozen_tensors.issuperset(node.inputs):
            continue
        if any(tensor.replaces is not None for tensor in node.outputs):
            continue
        read_names = {name for call in calls for name in call.buffers}
        if read_names & input_buffers or node.inputs:
            frozen_tensors.update(tensor.name for tensor in node.outputs)
            yield k


def _make_front(
    step: LoweredStep,
    nodes: Sequence[int],
    node_buffers: Sequence[Collection[str]],
    input_index_of: dict[str, int],
) -> Front:
    """Return the front that consists of `nodes`, given by their indices in the graph.

    `node_buffers` has the buffers of every node of the graph; the keys of `input_index_of` are
    buffers.
    """
    graph, front_nodes = step.graph, frozenset(nodes)
    read_names: set[str] = set(step.returned_buffers)
    for k, node in enumerate(graph.nodes):
        if k not in front_nodes:
            read_names.update(node.inputs, node_buffers[k])
    outputs = (tensor.name for k in nodes for tensor in graph.nodes[k].outputs)
    input_indices = sorted(input_index_of[name] for name in read_names & input_index_of.keys())
    return Front(
        nodes=front_nodes,
        outputs=tuple(name for name in outputs if name in read_names),
        inputs=tuple(input_indices),
    )


def program_instructions(step: LoweredStep, plan: Plan, skipped_nodes: Collection[int] = ()) -> int:
    """Return the estimated instructions of a plan, without computations of `skipped_nodes`.

    Recomputations count; nodes without an estimate count as 0.
    """
    executed_nodes = (k for op, k in plan.program if op == Op.COMPUTE and k not in skipped_nodes)
    return sum(step.graph.nodes[k].instructions or 0 for k in executed_nodes)


def replay_arena_bytes(replay: Replay, step: LoweredStep, plan: Plan, arena: Arena) -> int:
    """Return the arena size of a step on a stored sample [B]."""
    graph, front = step.graph, replay.front
    skipped_tensors = {
        graph.tensor_index[tensor.name]
        for k in front.nodes
        for tensor in graph.nodes[k].outputs
        if tensor.name not in front.outputs
    }
    end_bytes = 0
    for block in check_arena(graph, plan, arena).rectangles:
        if block.content == Content.WORKSPACE:
            is_used = block.index not in front.nodes
        else:
            is_used = block.index not in skipped_tensors
        if is_used and block.offset is not None:
            end_bytes = max(end_bytes, block.offset + block.bytes)
    return end_bytes


def sample_tensor_names(step: LoweredStep, front: Front) -> tuple[str, ...]:
    """Return the names of the tensors of a stored sample, for display."""
    return (*front.outputs, *(step.inputs[k].name for k in front.inputs))
