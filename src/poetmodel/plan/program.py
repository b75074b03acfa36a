"""Plans: the programs that devices execute, instruction by instruction."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from poetmodel.device import StorageMode
from poetmodel.errors import PlanError, quote
from poetmodel.files import write_text
from poetmodel.headers import THIS_VERSION, WRITTEN_BY
from poetmodel.plan.versions import FORMAT, VERSION, VERSION_WITH_STATE
from poetmodel.schedule.homes import Homes
from poetmodel.schedule.identity import COSTS
from poetmodel.schedule.instructions import Instruction, Op, Program
from poetmodel.schedule.metrics import Display, simulated_metrics
from poetmodel.schedule.relations import format_document
from poetmodel.units import brief

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from poetmodel.graph import Graph
    from poetmodel.plan.arena import Arena
    from poetmodel.plan.check import PlanCheck
    from poetmodel.plan.io import PlanFile
    from poetmodel.schedule import GraphIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A program, the identity of its graph, and the mode of its transfers.

    Raises
    ------
    ValueError
        If `mode` is no storage mode, or an instruction has an unknown operation.
    """

    program: Program = field(repr=False)
    """The instructions, in order."""
    mode: StorageMode
    """``blocking`` transfers occupy the core; ``dma`` transfers run in parallel, one at a time."""
    identity: GraphIdentity | None = field(default=None, compare=False, repr=False)
    """The graph that the plan was made for; None if unknown."""
    ram_budget_bytes: int | None = None
    """The RAM budget that the plan was made for, without resident bytes [B]; None if none is
    stated."""
    device: str | None = None
    """Key or name of the device; None if unknown."""
    resident: tuple[int, ...] | None = None
    """The state tensors whose home is RAM, ascending; None for a graph without state and
    in-place operators (`Graph.version` 1)."""
    memory_mapped: bool = False
    """Whether the core reads state from storage in place, without a copy in RAM."""
    commit: int | None = None
    """Number of training steps between writes of all replaced state to storage; None for no
    commits."""
    graph: Graph | None = field(default=None, compare=False, repr=False)
    """The graph itself; None if unknown, as for plans of `load`."""

    def __post_init__(self) -> None:
        """Convert instructions and mode to their types; sort `resident` and drop repeats."""
        program = tuple(Instruction(Op(op), int(index)) for op, index in self.program)
        object.__setattr__(self, "program", program)
        object.__setattr__(self, "mode", StorageMode(self.mode))
        if self.resident is not None:
            object.__setattr__(self, "resident", tuple(sorted(set(self.resident))))

    def __repr__(self) -> str:
        graph = "no graph named" if self.identity is None else quote(self.identity.name)
        device = "" if self.device is None else f"for {quote(self.device)}"
        return brief(self, graph, f"{len(self.program)} instructions, {self.mode}", device)

    def homes(self, graph: Graph) -> Homes:
        """Return the homes of state in the plan; `graph` is the plan's graph."""
        return Homes.from_resident(graph, self.resident or (), is_mapped=self.memory_mapped)

    def first_reads(self, graph: Graph) -> Mapping[int, int]:
        """Return each state tensor on storage, by the node whose ``compute`` is its first read.

        Empty if storage is memory-mapped, where the core reads state in place.
        """
        return self.homes(graph).first_reads

    def to_dict(self, check: PlanCheck | None = None, arena: Arena | None = None) -> dict[str, Any]:
        """Return the content of a plan file.

        With `check`, the result of `check_plan`, the content includes metrics and, if the check had
        costs, their digest; with `arena`, the arena's sizes and offsets. ``graph``, ``nodes`` and
        ``tensors`` are None without `identity`. ``resident``, ``memory_mapped`` and ``commit`` are
        absent if they are None or False.
        """
        identity = self.identity
        document: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION if self.resident is None else VERSION_WITH_STATE,
            WRITTEN_BY: THIS_VERSION,
            "graph": identity and {"name": identity.name, "sha256": identity.sha256},
            "device": self.device,
            "mode": str(self.mode),
            "ram_budget_bytes": self.ram_budget_bytes,
            "nodes": list(identity.nodes) if identity else None,
            "tensors": list(identity.tensors) if identity else None,
            "program": [[str(op), index] for op, index in self.program],
        }
        if self.resident is not None:
            document["resident"] = list(self.resident)
        if self.memory_mapped:
            document["memory_mapped"] = True
        if self.commit is not None:
            document["commit"] = self.commit
        if check is not None:
            if check.costs_sha256 is not None:
                document[COSTS] = {"sha256": check.costs_sha256}
            document.update(simulated_metrics(Display.PLAN_FILE, check))
        if arena is not None:
            document["arena"] = arena.to_dict()
        return document

    def save(
        self, path: str | Path, check: PlanCheck | None = None, arena: Arena | None = None
    ) -> None:
        """Write the content of `to_dict` as JSON; by convention, `path` ends with ``.plan.json``.

        Raises
        ------
        PlanError
            If the plan has no graph identity.
        InputError
            If the file cannot be written.
        """
        if self.identity is None:
            raise PlanError(
                "the plan names no graph; make it with identity=GraphIdentity.from_graph(graph)"
            )
        write_text(path, format_document(self.to_dict(check, arena)))

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan from a ``*.plan.json`` file, without its metrics and arena.

        Logs a warning on unknown keys at the top level, which are ignored, too. Raises `PlanError`
        if the file cannot be read or is invalid.
        """
        from poetmodel.plan.io import load_file
        from poetmodel.schedule.io import log_notes

        file = load_file(path)
        log_notes(file, path)
        return Plan.from_file(file)

    @staticmethod
    def from_file(file: PlanFile) -> Plan:
        """Make a plan from the content of a plan file, without its metrics and arena."""
        return Plan(
            program=tuple(Instruction(Op(op), index) for op, index in file.program),
            mode=StorageMode(file.mode),
            identity=file.identity(),
            ram_budget_bytes=file.ram_budget_bytes,
            device=file.device,
            resident=None if file.resident is None else tuple(file.resident),
            memory_mapped=file.memory_mapped,
            commit=file.commit,
        )
