"""Plans as Chrome trace events, for Perfetto and ``chrome://tracing``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from poetmodel.device.ram import KIND_NAMES, kind_index
from poetmodel.plan.listing import InstructionText
from poetmodel.plan.stays import list_stays, ram_in_use
from poetmodel.schedule.instructions import Instruction, Op
from poetmodel.schedule.machine import Content, InstructionRecord, Stay

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.graph import Graph
    from poetmodel.plan.check import PlanCheck
    from poetmodel.plan.program import Plan

Event = dict[str, Any]
"""A trace event: values by the keys of the Chrome trace format."""

PROCESS: Final = 1
"""Process id of all events."""
CORE: Final = 1
"""Thread id of the core's track."""
BUS: Final = 2
"""Thread id of the bus's track."""
_TRACKS: Final = {CORE: "core", BUS: "bus"}
"""Name of each track, by thread id."""


def trace_events(graph: Graph, plan: Plan, check: PlanCheck) -> dict[str, Any]:
    """Return a plan as a document of Chrome trace events.

    Parameters
    ----------
    graph : Graph
        The training graph.
    plan : Plan
        A valid plan of `graph`.
    check : PlanCheck
        Result of `check_plan`, with costs.

    Returns
    -------
    dict
        The content of a JSON file: computations and stalls on the core's track, transfers and first
        reads of state on the bus's track, flows from a page-out to the page-ins of its tensor, the
        peak, and counters of RAM by kind and in total, and of the budget, if the plan has one.
        Metadata come first, then events by time; ``otherData`` has the metrics.

    Raises
    ------
    PlanError
        If the plan is for another graph.
    TimeLimitError
        If a time limit of the calling context passes.

    Notes
    -----
    Times come from the simulator, rounded to nanoseconds. A counter changes when the simulated RAM
    does: during an instruction, the counter is the record's ``peak_bytes``, afterwards its
    ``ram_bytes``. Writes of commits after the last instruction have no events.
    """
    events = [*_TrackEvents(graph, plan, check).events(), *_counter_events(graph, plan, check)]
    events.sort(key=lambda event: event["ts"])  # stable: simultaneous events stay in order
    return {
        "traceEvents": [*_metadata_events(graph, plan), *events],
        "displayTimeUnit": "ms",
        "otherData": _plan_metrics(graph, plan, check),
    }


def trace_text(document: dict[str, Any]) -> str:
    """Return the JSON text of a document of trace events, one event or further key per line."""
    other_values = {
        key: json.dumps(value, allow_nan=False)
        for key, value in document.items()
        if key != "traceEvents"
    }
    events = ",\n".join(json.dumps(event, allow_nan=False) for event in document["traceEvents"])
    other_keys = "".join(f',\n"{key}": {value}' for key, value in other_values.items())
    return f'{{"traceEvents": [\n{events}\n]{other_keys}}}\n'


def _metadata_events(graph: Graph, plan: Plan) -> Iterator[Event]:
    device = f" on {plan.device}" if plan.device else ""
    yield _metadata_event("process_name", {"name": f"{graph.name}{device}"}, 0)
    for track, name in _TRACKS.items():
        yield _metadata_event("thread_name", {"name": name}, track)
        yield _metadata_event("thread_sort_index", {"sort_index": track}, track)


def _metadata_event(name: str, args: dict[str, Any], track: int) -> Event:
    return {"name": name, "ph": "M", "pid": PROCESS, "tid": track, "args": args}


def _plan_metrics(graph: Graph, plan: Plan, check: PlanCheck) -> dict[str, Any]:
    """Return graph name and hash, device, `StorageMode`, budget and metrics, for ``otherData``."""
    return {
        "graph": graph.name,
        "sha256": None if plan.identity is None else plan.identity.sha256,
        "device": plan.device,
        "mode": str(plan.mode),
        "ram_budget_bytes": plan.ram_budget_bytes,
        "peak_ram_bytes": check.peak_ram_bytes,
        "makespan_s": check.makespan_s,
        "stall_s": check.stall_s,
        "energy_j": check.energy_j,
    }


def _to_ns(time_s: float) -> int:
    return round(time_s * 1e9)


def _to_us(time_s: float) -> float:
    """Convert a time to microseconds, the unit of the format, rounded to nanoseconds."""
    return _to_ns(time_s) / 1000


class _TrackEvents:
    """Makes the events on the tracks of core and bus."""

    def __init__(self, graph: Graph, plan: Plan, check: PlanCheck) -> None:
        self.graph, self.plan, self.check = graph, plan, check
        self.text = InstructionText(graph, plan)

    def events(self) -> Iterator[Event]:
        """Yield the events of instructions in program order, with the peak and the flows."""
        executed_instructions: set[Instruction] = set()
        latest_page_out: dict[int, InstructionRecord] = {}
        n_flows = 0
        for position, (instruction, record) in enumerate(
            zip(self.plan.program, self.check.records, strict=True)
        ):
            if position == self.check.peak_position:
                yield self._peak_event(record)
            is_repeated = instruction in executed_instructions
            executed_instructions.add(instruction)
            event = self._instruction_event(position, instruction, record, is_repeated=is_repeated)
            if event is None:
                continue
            yield event
            if instruction.op == Op.PAGE_OUT:
                latest_page_out[instruction.index] = record
            elif instruction.op == Op.PAGE_IN and instruction.index in latest_page_out:
                yield from self._flow_events(
                    n_flows, instruction.index, latest_page_out[instruction.index], record
                )
                n_flows += 1

    def _instruction_event(
        self,
        position: int,
        instruction: Instruction,
        record: InstructionRecord,
        *,
        is_repeated: bool,
    ) -> Event | None:
        """Return the event of an instruction, on the track of the bus or of the core.

        Frees, state nodes that move no bytes, and waits without a stall have none. `is_repeated`:
        an equal instruction was executed before.
        """
        op, index = instruction
        text = self.text
        verb = text.format_verb(instruction, is_repeated=is_repeated)
        args: dict[str, Any] = {"instruction": position}
        track = CORE
        if op == Op.FREE or verb == "hold":
            return None
        if op == Op.WAIT:
            if record.end_s <= record.start_s:
                return None
            verb = "stall"
        elif op == Op.COMPUTE and index not in text.first_reads:
            args |= self._compute_arguments(index, record)
        else:
            track = BUS
            args |= self._transfer_arguments(
                text.first_reads[index] if op == Op.COMPUTE else index, record
            )
        args |= {"ram_bytes": record.peak_bytes, "ram_after_bytes": record.ram_bytes}
        name = text.format_name(instruction)
        begin_ns, end_ns = _to_ns(record.start_s), _to_ns(record.end_s)
        return {
            "name": name if verb == "compute" else f"{verb} {name}",
            "cat": verb.replace(" ", "_"),
            "ph": "X",
            "ts": begin_ns / 1000,
            "dur": (end_ns - begin_ns) / 1000,
            "pid": PROCESS,
            "tid": track,
            "args": args,
        }

    def _compute_arguments(self, k: int, record: InstructionRecord) -> dict[str, Any]:
        """Return ``args`` of a computation's event: node, phase, sizes [B], in-place pairs."""
        node, sizes, tensors = self.graph.nodes[k], self.graph.tensor_bytes, self.graph.tensors
        pairs = [pair for pair in self.graph.in_place_of[k] if pair[1] in record.in_place]
        arguments: dict[str, Any] = {
            "node": node.name,
            "op": node.op,
            "phase": str(node.phase),
            "outputs": {tensors[i].name: sizes[i] for i in self.graph.outputs_of[k]},
            "workspace_bytes": node.workspace_bytes,
        }
        if pairs:
            arguments["in_place"] = {
                tensors[output].name: tensors[overwritten].name for output, overwritten in pairs
            }
        return arguments

    def _transfer_arguments(self, i: int, record: InstructionRecord) -> dict[str, Any]:
        """Return the arguments of the event of a transfer, with its wait for the bus [us]."""
        tensor = self.graph.tensors[i]
        arguments: dict[str, Any] = {
            "tensor": tensor.name,
            "bytes": self.graph.tensor_bytes[i],
            "waits_for_bus_us": (_to_ns(record.start_s) - _to_ns(record.issued_s)) / 1000,
        }
        if tensor.replaces is not None:
            arguments["writes_back"] = tensor.replaces
        return arguments

    def _flow_events(
        self, number: int, i: int, page_out: InstructionRecord, page_in: InstructionRecord
    ) -> Iterator[Event]:
        """Yield the events of flow `number` from the start of a page-out to that of a page-in."""
        common_keys = {
            "name": f"{self.graph.tensors[i].name} on storage",
            "cat": "storage",
            "id": number,
            "pid": PROCESS,
            "tid": BUS,
        }
        yield common_keys | {"ph": "s", "ts": _to_us(page_out.start_s)}
        yield common_keys | {"ph": "f", "bp": "e", "ts": _to_us(page_in.start_s)}

    def _peak_event(self, record: InstructionRecord) -> Event:
        """Return the instant event of the peak RAM, at the issue of its instruction."""
        return {
            "name": "peak RAM",
            "cat": "peak",
            "ph": "i",
            "s": "p",
            "ts": _to_us(record.issued_s),
            "pid": PROCESS,
            "tid": CORE,
            "args": {"ram_bytes": record.peak_bytes},
        }


def _counter_events(graph: Graph, plan: Plan, check: PlanCheck) -> Iterator[Event]:
    """Yield counter events of RAM, in total and by kind, and of the budget, if there is one."""
    times_s = [record.issued_s for record in check.records]
    times_s += [record.end_s for record in check.records[-1:]]
    last_kind_bytes = None
    for position, bytes_of_kinds in enumerate(zip(*_ram_by_kind(graph, plan), strict=True)):
        bytes_during_and_after = list(zip(*bytes_of_kinds, strict=True))
        for time_s, kind_bytes in zip(
            times_s[position : position + 2], bytes_during_and_after, strict=True
        ):
            if kind_bytes != last_kind_bytes:
                yield _counter_event("RAM", time_s, {"bytes": sum(kind_bytes)})
                yield _counter_event(
                    "RAM by kind", time_s, dict(zip(KIND_NAMES, kind_bytes, strict=True))
                )
                last_kind_bytes = kind_bytes
    end_s = max((record.end_s for record in check.records), default=0.0)
    if last_kind_bytes is not None:
        yield _counter_event("RAM", end_s, {"bytes": sum(last_kind_bytes)})
        yield _counter_event(
            "RAM by kind", end_s, dict(zip(KIND_NAMES, last_kind_bytes, strict=True))
        )
    if plan.ram_budget_bytes is not None:
        for time_s in (0.0, end_s):
            yield _counter_event("RAM budget", time_s, {"bytes": plan.ram_budget_bytes})


def _ram_by_kind(graph: Graph, plan: Plan) -> list[tuple[tuple[int, int], ...]]:
    """Return (RAM during, RAM after) each instruction, for each of `KIND_NAMES` [B]."""
    stays_by_kind: list[list[Stay]] = [[] for _ in KIND_NAMES]
    for stay in list_stays(graph, plan):
        tensor = stay.index if stay.content == Content.OUTPUT else None
        stays_by_kind[kind_index(graph, tensor)].append(stay)
    return [ram_in_use(stays, len(plan.program)) for stays in stays_by_kind]


def _counter_event(name: str, time_s: float, series: dict[str, int]) -> Event:
    return {"name": name, "ph": "C", "ts": _to_us(time_s), "pid": PROCESS, "tid": 0, "args": series}
