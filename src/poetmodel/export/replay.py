"""Latent replay: samples kept as the outputs of a frozen front, and steps that begin behind it.

A sample is what the nodes behind the front read of it: outputs of the front, and inputs such as
labels. A step on a stored sample runs the program of the whole step without the nodes of the front,
at the same addresses, so that it has the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from poetmodel.errors import InputError
from poetmodel.lowered.kernels import RANDOM
from poetmodel.plan import Op
from poetmodel.plan.arena_check import check_arena
from poetmodel.schedule.machine import Content

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from poetmodel.device.generation import GenerationLayout
    from poetmodel.lowered.step import LoweredStep
    from poetmodel.plan import Plan
    from poetmodel.plan.arena import Arena

MAX_SAMPLES: Final = 65_535
"""How many samples a step keeps at most: their groups have numbers of 16 bits."""
HEADER_BYTES: Final = 32
"""Size of what a group begins with [B]: ``src/pm_replay.c``."""
CHECKSUM_BYTES: Final = 4
"""Size of a sample's checksum [B]."""
CHUNK_BYTES: Final = 64
"""What a group is written in, unless the storage has larger write units [B]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """The frozen beginning of a step, and what is read of it behind."""

    nodes: frozenset[int]
    """The nodes of the front."""
    outputs: tuple[str, ...]
    """The buffers that nodes behind it read, in the order of the graph."""
    inputs: tuple[int, ...]
    """The inputs of the step that nodes behind it read, by their numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Storage for samples, in groups that are written as a whole."""

    samples: int
    front: Front
    part_bytes: tuple[int, ...]
    """Sizes of the outputs of the front, then of inputs [B]."""
    layout: GenerationLayout

    @property
    def sample_bytes(self) -> int:
        """Storage of a sample in its group, its checksum included [B]."""
        return sum(-(-size // 4) * 4 for size in self.part_bytes) + CHECKSUM_BYTES

    @property
    def chunk_bytes(self) -> int:
        """What a group is written in; its seal has a chunk of its own [B]."""
        return max(CHUNK_BYTES, self.layout.write_unit_bytes)

    @property
    def group_samples(self) -> int:
        """How many samples a group has: those of an erase block, at least one."""
        room = self.layout.erase_block_bytes - HEADER_BYTES - 2 * self.chunk_bytes
        return max(1, min(self.samples, room // self.sample_bytes))

    @property
    def groups(self) -> int:
        """How many places of groups there are: one more than groups, for the next version."""
        return -(-self.samples // self.group_samples) + 1

    @property
    def group_bytes(self) -> int:
        """Storage of a group in its erase blocks [B]."""
        chunk, block = self.chunk_bytes, self.layout.erase_block_bytes
        inside = HEADER_BYTES + self.group_samples * self.sample_bytes
        return -(-(-(-inside // chunk) * chunk + chunk) // block) * block

    @property
    def stored_bytes(self) -> int:
        """Storage of all groups [B]."""
        return self.groups * self.group_bytes

    @property
    def input_bytes(self) -> int:
        """RAM of the inputs of a stored sample [B]."""
        return sum(-(-size // 4) * 4 for size in self.part_bytes[len(self.front.outputs) :])

    @property
    def ram_bytes(self) -> int:
        """RAM of a stored step beside that of a step: inputs, a chunk, the places of groups [B]."""
        return self.input_bytes + self.chunk_bytes + 2 * self.groups + 2 * self.groups % 4


def check_samples(samples: int) -> None:
    """Raise unless a step can keep this number of samples; 0 is none."""
    if type(samples) is not int or not 0 <= samples <= MAX_SAMPLES:
        raise InputError(
            f"replay: expected a number of samples from 1 to {MAX_SAMPLES:,}, got {samples!r}"
        )


def replay_of(step: LoweredStep, samples: int, layout: GenerationLayout) -> Replay:
    """Return the storage of samples of a step.

    Raises
    ------
    InputError
        If the step updates nothing, or has no frozen front.
    """
    if step.learning_rate is None:
        raise InputError(
            f"replay: {step.graph.name} has no optimizer, so that a step updates nothing; give one"
        )
    front = find_front(step)
    if front is None:
        raise InputError(
            f"replay: {step.graph.name} has no frozen front: its first layers train, draw random "
            "numbers, or change running statistics; freeze them (requires_grad_(False), eval() "
            "for batch norm), or quantize them"
        )
    sizes = [step.buffers[name].bytes for name in front.outputs]
    sizes += [step.buffers[step.inputs[k].pieces[0].buffer].bytes for k in front.inputs]
    return Replay(samples=samples, front=front, part_bytes=tuple(sizes), layout=layout)


def in_plan_order(replay: Replay, step: LoweredStep, plan: Plan) -> Replay:
    """Return the storage with the outputs of the front in the order in which a plan makes them."""
    first: dict[int, int] = {}
    for position, (op, k) in enumerate(plan.program):
        if op == Op.COMPUTE:
            first.setdefault(k, position)
    graph, front = step.graph, replay.front
    made = {
        name: (first[graph.node_of[graph.tensor_index[name]]], number)
        for number, name in enumerate(front.outputs)
    }
    outputs = tuple(sorted(front.outputs, key=made.__getitem__))
    sizes = [step.buffers[name].bytes for name in outputs]
    return replace(
        replay,
        front=replace(front, outputs=outputs),
        part_bytes=(*sizes, *replay.part_bytes[len(outputs) :]),
    )


def find_front(step: LoweredStep) -> Front | None:
    """Return the front whose samples are the smallest, of those the longest; None without any.

    A front is a beginning of the nodes, in the order of the graph, that depend on inputs and
    constants alone: not on state, not on random numbers.
    """
    fixed = tuple(_fixed(step))
    inputs = {value.pieces[0].buffer: k for k, value in enumerate(step.inputs)}
    named = [{name for call in calls for name in call.buffers} for calls in step.calls]
    best: tuple[int, int] | None = None
    found = None
    for count in range(1, len(fixed) + 1):
        front = _front(step, fixed[:count], named, inputs)
        size = sum(step.buffers[name].bytes for name in front.outputs)
        size += sum(step.buffers[step.inputs[k].pieces[0].buffer].bytes for k in front.inputs)
        if front.outputs and (best is None or (size, -count) < best):
            best, found = (size, -count), front
    return found


def _fixed(step: LoweredStep) -> Iterator[int]:
    """Yield the nodes that depend on inputs and constants alone, and on an input at least."""
    inputs = {value.pieces[0].buffer for value in step.inputs}
    made: set[str] = set()
    for k, (node, calls) in enumerate(zip(step.graph.nodes, step.calls, strict=True)):
        is_random = any(call.kernel in RANDOM for call in calls)
        if node.is_state or is_random or not made.issuperset(node.inputs):
            continue
        if any(tensor.replaces is not None for tensor in node.outputs):
            continue
        read = {name for call in calls for name in call.buffers}
        if read & inputs or node.inputs:
            made.update(tensor.name for tensor in node.outputs)
            yield k


def _front(
    step: LoweredStep,
    nodes: Sequence[int],
    named: Sequence[Collection[str]],
    inputs: dict[str, int],
) -> Front:
    graph, front = step.graph, frozenset(nodes)
    behind: set[str] = set(step.handed_out)
    for k, node in enumerate(graph.nodes):
        if k not in front:
            behind.update(node.inputs, named[k])
    outputs = (tensor.name for k in nodes for tensor in graph.nodes[k].outputs)
    read = sorted(inputs[name] for name in behind & inputs.keys())
    return Front(
        nodes=front,
        outputs=tuple(name for name in outputs if name in behind),
        inputs=tuple(read),
    )


def instructions_of(step: LoweredStep, plan: Plan, without: Collection[int] = ()) -> int:
    """Return the estimated instructions of a program, without those of some nodes."""
    computed = (k for op, k in plan.program if op == Op.COMPUTE and k not in without)
    return sum(step.graph.nodes[k].instructions or 0 for k in computed)


def stored_arena_bytes(replay: Replay, step: LoweredStep, plan: Plan, arena: Arena) -> int:
    """Return how much of the arena a step on a stored sample uses [B]."""
    graph, front = step.graph, replay.front
    left_out = {
        graph.tensor_index[tensor.name]
        for k in front.nodes
        for tensor in graph.nodes[k].outputs
        if tensor.name not in front.outputs
    }
    used = 0
    for block in check_arena(graph, plan, arena).rectangles:
        if block.content == Content.WORKSPACE:
            is_used = block.index not in front.nodes
        else:
            is_used = block.index not in left_out
        if is_used and block.offset is not None:
            used = max(used, block.offset + block.bytes)
    return used


def rows_of(step: LoweredStep, front: Front) -> tuple[str, ...]:
    """Return the names of what a sample holds, for people."""
    return (*front.outputs, *(step.inputs[k].name for k in front.inputs))
