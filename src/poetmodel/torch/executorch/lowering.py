"""An edge program as a file of ExecuTorch, with a memory plan of ExecuTorch's or of ours."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from executorch.exir import ExecutorchBackendConfig
from executorch.exir._serialize._program import deserialize_pte_binary
from executorch.exir.emit import _emit_program
from executorch.exir.memory_planning import (
    MemoryAlgoResult,
    MemoryPlanningAlgorithmSuite,
    SpecAllocResult,
    greedy,
)
from executorch.exir.passes import MemoryPlanningPass
from torch.export.graph_signature import OutputKind

from poetmodel.clock import rare_collections
from poetmodel.placement.lifetimes import Block, Span
from poetmodel.placement.placing import place_blocks
from poetmodel.plan.arena import ALIGNMENT
from poetmodel.schedule.machine import BEFORE, Content
from poetmodel.torch.capturing.replay import temporarily
from poetmodel.torch.executorch import quiet

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from executorch.exir import EdgeProgramManager
    from executorch.exir.tensor import TensorSpec
    from torch.export import ExportedProgram

METHOD: Final = "forward"
"""Name of the step in a file."""
_INDEX: Final = "__et_training_{}_index_"
"""The methods of a file that tell where its gradients and its parameters begin."""


@dataclass(frozen=True, slots=True)
class LoweredProgram:
    """Content of a program's file."""

    program: bytes
    greedy_bytes: int
    """The size of the arena with the addresses of ExecuTorch's greedy planner [B]."""

    @property
    def arena_bytes(self) -> int:
        """The size of the arena that the file asks for [B]."""
        program = deserialize_pte_binary(self.program).program
        (step,) = (plan for plan in program.execution_plan if plan.name == METHOD)
        return sum(step.non_const_buffer_sizes)


def lowered(edge: EdgeProgramManager, *, is_ours: bool, time_limit: float = 10.0) -> LoweredProgram:
    """Return a program with addresses that ExecuTorch chose, or that are ours."""
    placement = _Placement(time_limit, is_ours=is_ours)
    suite = MemoryPlanningAlgorithmSuite([placement])
    planning = MemoryPlanningPass(suite, alignment=ALIGNMENT)
    before = _emit_program._get_training_metadata  # noqa: SLF001 - has no other name
    setter = lambda value: setattr(_emit_program, "_get_training_metadata", value)  # noqa: E731
    counted = lambda methods: _counted(before(methods), methods)  # noqa: E731
    with quiet(), rare_collections(), temporarily(setter, counted, before):
        # It changes what it makes a program of.
        program = copy.deepcopy(edge).to_executorch(
            ExecutorchBackendConfig(memory_planning_pass=planning)
        )
    return LoweredProgram(program.buffer, placement.greedy_bytes)


def _counted(metadata: dict[str, Any], methods: Mapping[str, ExportedProgram]) -> dict[str, Any]:
    """Return the starts of gradients and of parameters among the outputs of a method.

    ExecuTorch 1.5.1 counts new values of buffers too, which no method returns.
    """
    kinds = {"gradients": OutputKind.GRADIENT_TO_PARAMETER, "parameters": OutputKind.TOKEN}
    for name, program in methods.items():
        specs = program.graph_signature.output_specs
        returned = [spec.kind for spec in specs if spec.kind != OutputKind.BUFFER_MUTATION]
        for what, kind in kinds.items():
            if kind in returned:
                metadata[_INDEX.format(what) + name] = returned.index(kind)
    return metadata


class _Placement:
    """Chooses addresses for what a program has in its arena."""

    __name__ = "poetmodel"

    def __init__(self, time_limit: float, *, is_ours: bool) -> None:
        self._time_limit, self._is_ours = time_limit, is_ours
        self.greedy_bytes = 0

    def __call__(
        self, alignment: int, specs: Iterable[TensorSpec], *others: Any
    ) -> MemoryAlgoResult:
        """Return a number of a memory and an offset for each tensor."""
        placed = list(specs)
        result = greedy(alignment, placed, *others)
        self.greedy_bytes = sum(result.bufsizes)
        if not self._is_ours:
            return result
        length = 1 + max((spec.lifetime[1] for spec in placed), default=0)
        blocks = [_block(number, spec, length) for number, spec in enumerate(placed)]
        offsets, size, _ = place_blocks(blocks, length, time_limit=self._time_limit)
        numbered = enumerate(zip(placed, offsets, strict=True))
        chosen = {spec: SpecAllocResult(1, number, at) for number, (spec, at) in numbered}
        return MemoryAlgoResult(chosen, [0, size])


def _block(number: int, spec: TensorSpec, length: int) -> Block:
    begin, last = spec.lifetime
    position = BEFORE if begin == 0 and last + 1 == length else begin
    return Block(
        spans=[Span(begin, last + 1, spec.allocated_memory)],
        contents=[(position, Content.OUTPUT, number)],
    )
