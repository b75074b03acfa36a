"""Time and energy of every computation and every transfer, measured or estimated."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from numbers import Real
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from poetmodel.device.cost import FREE, Cost, PageCost
from poetmodel.device.generation import GenerationLayout
from poetmodel.device.profile import read_profile, write_profile
from poetmodel.errors import CostError, join_names, quote
from poetmodel.units import brief

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from poetmodel.device.cores import CycleModel
    from poetmodel.device.hardware import Device
    from poetmodel.graph import Graph


_MAX_NAMED: Final = 4
"""Maximum number of names in a list of a message, as `max_names` of `join_names`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Cost per step of commits: writes of all replaced state to storage, every N steps.

    In a `CostTable`, the page-out of each of `replacements` has the cost per step of its write: at
    the page-out if the home of the state is storage, otherwise after all other actions.
    """

    replacements: tuple[int, ...]
    """The replacements whose page-outs are writes of the commit; none if commits copy state from
    volatile storage to flash."""
    other_cost: Cost
    """Cost of commits except writes of `replacements`: erases of flash, the record and the seal. If
    commits copy state from volatile storage to flash, also the writes of all replaced state."""
    min_costs: Mapping[int, Cost]
    """Lower bound on the cost of each replacement, by its index: the write and, in flash, its
    fraction of the erases."""
    written_bytes: int
    """Average bytes written per step, including checksums, record and seal, rounded up [B]."""
    erased_blocks: float
    """Average number of blocks erased per step if generations share no block."""
    worn_blocks: float
    """Average number of blocks erased per step, lower if several generations fit in one block."""
    generation_bytes: int
    """Size of a generation on storage, in whole blocks [B]; storage holds at least two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """The costs of one graph, indexed by node (compute) or tensor (page), in seconds and joules.

    Costs are of single computations and transfers, except for writes of commits; see `Commit`. The
    page columns are empty if no tensor can be paged.
    """

    compute_time_s: tuple[float, ...]
    compute_energy_j: tuple[float, ...]
    page_in_time_s: tuple[float, ...]
    page_in_energy_j: tuple[float, ...]
    page_out_time_s: tuple[float, ...]
    page_out_energy_j: tuple[float, ...]
    has_storage: bool
    """Whether tensors can be paged."""
    commit: Commit | None = None
    """Cost of commits; None without commits."""

    def __repr__(self) -> str:
        counts = f"{len(self.compute_time_s)} nodes, {len(self.page_in_time_s)} tensors"
        return brief(self, counts if self.has_storage else f"{counts}, no storage")

    def to_dict(self) -> dict[str, Any]:
        """Return the columns as lists, and `has_storage`; without `commit`."""
        names = [field.name for field in fields(self) if field.name != "commit"]
        columns = {name: getattr(self, name) for name in names}
        return {
            name: value if isinstance(value, bool) else list(value)
            for name, value in columns.items()
        }

    def compute_totals(self, counts: Mapping[int, int]) -> Cost:
        """Return the cost of computations; `counts` maps nodes to their number of computations."""
        return Cost(
            _weighted_sum(counts, self.compute_time_s), _weighted_sum(counts, self.compute_energy_j)
        )

    def transfer_totals(self, page_ins: Mapping[int, int], page_outs: Mapping[int, int]) -> Cost:
        """Return the cost of transfers, by their number per tensor; 0 without storage."""
        if not self.has_storage:
            return FREE
        return Cost(
            _weighted_sum(page_ins, self.page_in_time_s)
            + _weighted_sum(page_outs, self.page_out_time_s),
            _weighted_sum(page_ins, self.page_in_energy_j)
            + _weighted_sum(page_outs, self.page_out_energy_j),
        )

    def commit_totals(self, paged_out: Collection[int] = ()) -> Cost:
        """Return the cost of commits per step, without the `paged_out` (see `transfer_totals`)."""
        if self.commit is None:
            return FREE
        remaining_writes = {new: 1 for new in self.commit.replacements if new not in paged_out}
        return self.transfer_totals({}, remaining_writes) + self.commit.other_cost


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs by node and tensor name; `table` arranges them in a graph's order.

    The mappings `compute` and `pages` are copied, and read-only.

    Raises
    ------
    CostError
        If a time or energy is negative or not a finite number; lists every such value.

    Examples
    --------
    >>> costs = Costs(compute={"a": Cost(1.0, 2.0)}, pages={"a": PageCost(FREE, FREE)})
    >>> costs.compute["a"].energy_j
    2.0
    """

    compute: Mapping[str, Cost]
    """Cost of one computation of each node, except nodes that hold state."""
    pages: Mapping[str, PageCost] | None = None
    """Cost of transfers of each tensor; None without auxiliary storage."""
    device: Device | None = None
    """The device with its RAM, storage size and mode, and idle power; None if unknown."""
    source: str = field(default="", compare=False)
    """Source of the costs, for messages."""
    commit: int | None = None
    """Number of steps between writes of all replaced state to storage; None for no commits."""
    cycles: CycleModel | None = field(default=None, compare=False)
    """Model that converted instructions to compute times; None if these have another source."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "compute", MappingProxyType(dict(self.compute)))
        if self.pages is not None:
            object.__setattr__(self, "pages", MappingProxyType(dict(self.pages)))
        faults = list(_faults(self))
        if faults:
            raise CostError(faults)

    def __repr__(self) -> str:
        pages = "no storage" if self.pages is None else f"{len(self.pages)} tensors"
        device = "" if self.device is None else quote(self.device.short_name)
        return brief(self, f"{len(self.compute)} nodes, {pages}", device or quote(self.source))

    def __reduce__(self) -> tuple[object, ...]:
        pages = None if self.pages is None else dict(self.pages)
        values: dict[str, Any] = {"compute": dict(self.compute), "pages": pages}
        names = ("device", "source", "commit", "cycles")
        values |= {name: getattr(self, name) for name in names}
        return partial(type(self), **values), ()

    @classmethod
    def load(cls, path: str | Path, *, device: Device | None = None) -> Costs:
        """Read a profile, a CSV file of measured costs.

        Parameters
        ----------
        path : str or Path
            The file.
        device : Device, optional
            The device that was measured. If it has no storage, the page columns are ignored.
            Otherwise, and without `device`, `table` requires the page costs of every tensor.

        Raises
        ------
        CostError
            If the file cannot be read or has errors; lists each error with its line.
        """
        content = read_profile(path)
        costs = cls(compute=content.compute, pages=content.pages, source=str(path))
        return costs if device is None else costs.for_device(device)

    def for_device(self, device: Device) -> Costs:
        """Return these costs as those of a device.

        Parameters
        ----------
        device : Device
            The device that was measured.

        Returns
        -------
        Costs
            The same costs with `device`; without page costs if it has no storage.
        """
        return replace(self, device=device, pages=None if device.storage is None else self.pages)

    def save(self, path: str | Path) -> None:
        """Write a profile: a CSV file of compute and page costs that `load` reads.

        Raises `poetmodel.InputError` if the file cannot be written.
        """
        write_profile(path, self.compute, self.pages or {})

    @classmethod
    def estimate(cls, graph: Graph, device: Device) -> Costs:
        """Estimate the costs of a graph on a device.

        Parameters
        ----------
        graph : Graph
            Provides FLOP and bytes per node and, for exported C, instructions.
        device : Device
            Provides rates and powers.

        Returns
        -------
        Costs
            For every node of `graph` that does not hold state, and for every tensor if the device
            has storage.

        Raises
        ------
        CostError
            If an argument has the wrong type.

        Notes
        -----
        A node takes ``flops / flops_per_s``, or its memory traffic divided by the RAM bandwidth if
        the device states it and that is longer. Its energy is ``flops / flops_per_j`` if the device
        states it, else time times power. A transfer takes its latency plus bytes divided by rate,
        and the energy of that time times its power.

        A node that states `instructions` (exported C) instead takes these divided by instructions
        per cycle and clock, times the memory factor, if the device is a Cortex-M with an FPU whose
        clock and power are known. Its energy is that time times power. `cycles` contains these
        parameters.
        """
        if not hasattr(graph, "nodes"):
            raise CostError(f"graph: expected a Graph, got {quote(graph)}; Graph.load reads one")
        if not hasattr(device, "compute"):
            raise CostError(
                f"device: expected a Device, got {quote(device)}; Device.load reads one"
            )
        cycle_model, power_w, uses_cycle_model = device.cycle_model, device.compute.power_w, False
        compute = {}
        for k, node in enumerate(graph.nodes):
            if node.instructions is not None and cycle_model is not None and power_w is not None:
                time_s, uses_cycle_model = node.instructions / cycle_model.instructions_per_s, True
                compute[node.name] = Cost.at_power(time_s, power_w)
            elif not node.is_state:
                compute[node.name] = _estimate_node(graph, k, device)
        pages = None
        if device.storage is not None:
            read_direction, write_direction = device.storage.page_in, device.storage.page_out
            pages = {
                tensor.name: PageCost(
                    *(
                        Cost.at_power(direction.time_s(tensor.bytes), direction.power_w)
                        for direction in (read_direction, write_direction)
                    )
                )
                for tensor in graph.tensors
            }
        source = f"device {device.short_name}"
        cycles = cycle_model if uses_cycle_model else None
        return cls(compute=compute, pages=pages, device=device, source=source, cycles=cycles)

    @classmethod
    def from_arrays(
        cls,
        graph: Graph,
        *,
        compute_time_s: Sequence[float],
        compute_energy_j: Sequence[float],
        page_in: Sequence[tuple[float, float]] | None = None,
        page_out: Sequence[tuple[float, float]] | None = None,
        device: Device | None = None,
    ) -> Costs:
        """Make costs from sequences in a graph's order.

        Parameters
        ----------
        graph : Graph
            Provides the names.
        compute_time_s, compute_energy_j : sequence of float, one per node
            Costs of one computation [s], [J]; 0 for a node that holds state, or
            `table` raises an error.
        page_in, page_out : sequence of (time, energy), one per tensor, optional
            Costs of one transfer [s], [J]; without them no tensor can be paged.
        device : Device, optional
            The device with its RAM, storage and idle power.

        Returns
        -------
        Costs
            The given costs, by name.

        Raises
        ------
        CostError
            If a cost is negative or not finite, or only one of `page_in`, `page_out` is given.
        ValueError
            If the length of a sequence differs from the number of nodes or tensors.
        """
        compute = {
            node.name: Cost(float(time), float(energy))
            for node, time, energy in zip(
                graph.nodes, compute_time_s, compute_energy_j, strict=True
            )
            if time or energy or not node.is_state
        }
        if (page_in is None) != (page_out is None):
            raise CostError("expected both page_in and page_out, or neither")
        pages = None
        if page_in is not None and page_out is not None:
            pages = {
                tensor.name: PageCost(
                    Cost(*map(float, page_in_cost)), Cost(*map(float, page_out_cost))
                )
                for tensor, page_in_cost, page_out_cost in zip(
                    graph.tensors, page_in, page_out, strict=True
                )
            }
        return cls(compute=compute, pages=pages, device=device)

    def table(self, graph: Graph) -> CostTable:
        """Arrange the costs in a graph's order.

        If `commit` is set, there is storage and the graph replaces state, the table has the cost of
        commits, and the page-outs of `Commit.replacements` have the costs of their writes.

        Raises
        ------
        CostError
            If a node or tensor has no costs, or costs name a node or tensor that the graph lacks or
            a node that holds state.
        """
        faults = list(_graph_mismatch_faults(self, graph))
        if faults:
            raise CostError(f"{self.source}: {fault}" if self.source else fault for fault in faults)
        compute = [FREE if node.is_state else self.compute[node.name] for node in graph.nodes]
        pages = [] if self.pages is None else [self.pages[tensor.name] for tensor in graph.tensors]
        page_outs = [page.page_out for page in pages]
        commit = None
        if self.commit is not None and self.pages is not None and graph.state_of:
            commit, writes = _commit_cost(graph, page_outs, self.device, interval=self.commit)
            page_outs = [writes.get(i, cost) for i, cost in enumerate(page_outs)]
        return CostTable(
            compute_time_s=tuple(cost.time_s for cost in compute),
            compute_energy_j=tuple(cost.energy_j for cost in compute),
            page_in_time_s=tuple(cost.page_in.time_s for cost in pages),
            page_in_energy_j=tuple(cost.page_in.energy_j for cost in pages),
            page_out_time_s=tuple(cost.time_s for cost in page_outs),
            page_out_energy_j=tuple(cost.energy_j for cost in page_outs),
            has_storage=self.pages is not None,
            commit=commit,
        )


def digest_costs(table: CostTable, device: Device | None) -> str:
    """Return the SHA-256 of all that energies and times of schedules depend on beside the graph."""
    columns = {
        name: value if isinstance(value, bool) else [float(cost) for cost in value]
        for name, value in table.to_dict().items()
    }
    content = {
        **columns,
        "commit": None if table.commit is None else asdict(table.commit),
        "idle_power_w": 0.0 if device is None else float(device.idle_power_w),
        "memory_mapped": device is not None and device.is_memory_mapped,
    }
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), default=float)
    return hashlib.sha256(text.encode()).hexdigest()


def _commit_cost(
    graph: Graph, page_outs: Sequence[Cost], device: Device | None, *, interval: int
) -> tuple[Commit, dict[int, Cost]]:
    """Return costs per step of a commit every `interval` steps, and of its writes by replacement.

    In flash, bytes are written at the flash's rate, and `Commit.other_cost` has the erases of all
    blocks of the generation, even of shared blocks. On other storage, a write is a page-out, erases
    included.
    """
    layout, fraction = GenerationLayout.for_device(device), 1 / interval
    sizes = {i: graph.tensor_bytes[i] for i in sorted(graph.state_of)}
    storage = None if device is None else device.storage
    flash = None if device is None or not device.commits_to_flash else device.flash
    blocks = layout.n_blocks(sizes.values())

    def write_cost(size_bytes: int, page_out: Cost = FREE, page_out_bytes: int = 0) -> Cost:
        """Return the cost per step of writing `size_bytes` in each commit.

        On storage other than flash, `page_out` includes `page_out_bytes`; the remaining bytes are
        written at the rate of page-outs, or at no cost if no device states this rate.
        """
        if flash is not None:
            time_s, power_w = flash.write_s(size_bytes, 0), flash.power_w
        elif storage is not None:
            direction, power_w = storage.page_out, storage.page_out.power_w
            time_s = (size_bytes - page_out_bytes) / direction.bytes_per_s
        else:
            time_s = power_w = 0.0
        first_cost = FREE if flash is not None else page_out
        return (first_cost + Cost.at_power(time_s, power_w)) * fraction

    writes = {
        i: write_cost(layout.stored_bytes(tensor_bytes), page_outs[i], tensor_bytes)
        for i, tensor_bytes in sizes.items()
    }
    min_costs = writes
    # The fastest page-out stands for the latency and erases of the record and of the seal.
    fastest_page_out = min(page_outs, key=attrgetter("time_s"))
    record_and_seal_costs = (
        write_cost(size_bytes, fastest_page_out) for size_bytes in layout.record_and_seal_bytes
    )
    other_cost = sum(record_and_seal_costs, FREE)
    if flash is not None:
        is_volatile = device is not None and device.is_volatile
        other_cost = write_cost(layout.size_bytes(sizes.values() if is_volatile else ()))
        other_cost += Cost.at_power(fraction * flash.write_s(0, blocks), flash.power_w)
        erase_s_per_byte = fraction * flash.write_s(0, 1) / layout.erase_block_bytes
        erase_times_s = {
            i: erase_s_per_byte * layout.stored_bytes(tensor_bytes)
            for i, tensor_bytes in sizes.items()
        }
        min_costs = {
            i: cost + Cost.at_power(erase_times_s[i], flash.power_w) for i, cost in writes.items()
        }
        writes = {} if is_volatile else writes
    commit = Commit(
        replacements=tuple(writes),
        other_cost=other_cost,
        min_costs=min_costs,
        written_bytes=math.ceil(fraction * layout.size_bytes(sizes.values())),
        erased_blocks=fraction * blocks,
        worn_blocks=fraction * blocks / layout.generations_per_block(tuple(sizes.values())),
        generation_bytes=blocks * layout.erase_block_bytes,
    )
    return commit, writes


def _weighted_sum(counts: Mapping[int, int], costs: Sequence[float]) -> float:
    return sum(counts[index] * costs[index] for index in sorted(counts) if counts[index])


def _estimate_node(graph: Graph, k: int, device: Device) -> Cost:
    """Return the cost of node `k`, estimated from FLOP and `bytes_moved`, not instructions."""
    node = graph.nodes[k]
    compute = device.compute
    time_s = node.flops / compute.flops_per_s
    if compute.bytes_per_s is not None:
        time_s = max(time_s, _bytes_moved(graph, k) / compute.bytes_per_s)
    if compute.flops_per_j is not None:
        return Cost(time_s, node.flops / compute.flops_per_j)
    return Cost.at_power(time_s, compute.power_w or 0.0)


def _bytes_moved(graph: Graph, k: int) -> int:
    """Return the memory traffic of node `k` [B]: as stated, else the size of inputs and outputs."""
    node = graph.nodes[k]
    if node.bytes_moved is not None:
        return node.bytes_moved
    return node.output_bytes + sum(graph.tensor_bytes[i] for i in graph.inputs_of[k])


def _faults(costs: Costs) -> Iterator[str]:
    for name, cost in costs.compute.items():
        yield from _cost_fault(f"{name}: compute", cost)
    for name, page in (costs.pages or {}).items():
        yield from _cost_fault(f"{name}: page_in", page.page_in)
        yield from _cost_fault(f"{name}: page_out", page.page_out)


def _cost_fault(prefix: str, cost: Cost) -> Iterator[str]:
    for quantity in ("time_s", "energy_j"):
        value: Any = getattr(cost, quantity)
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if not is_number or not 0 <= value < math.inf:
            yield f"{prefix}_{quantity}: expected a finite number >= 0, got {quote(value)}"


def _graph_mismatch_faults(costs: Costs, graph: Graph) -> Iterator[str]:
    """Yield errors for missing costs, costs of unknown names, and compute costs of state nodes."""
    state_names = {graph.nodes[graph.node_of[i]].name for i in graph.state_tensors}
    computed_names = [name for name in graph.node_index if name not in state_names]
    cost_tables: list[tuple[str, str, Mapping[str, object], Collection[str]]] = [
        ("compute", "node", costs.compute, computed_names)
    ]
    if costs.pages is not None:
        cost_tables.append(("page", "tensor", costs.pages, graph.tensor_index))
    for kind, item_kind, costs_by_name, names_in_graph in cost_tables:
        missing_names = [quote(name) for name in names_in_graph if name not in costs_by_name]
        if missing_names:
            yield (
                f"no {kind} costs for {join_names(missing_names, max_names=_MAX_NAMED)} of graph "
                f"{graph.name!r}; every {item_kind} needs a row with the {kind} columns"
            )
        graph_names = frozenset(names_in_graph)
        extra_names = [quote(name) for name in costs_by_name if name not in graph_names]
        extra_state_names = [
            quote(name) for name in costs_by_name if kind == "compute" and name in state_names
        ]
        if extra_state_names:
            yield (
                f"compute costs for {join_names(extra_state_names, max_names=_MAX_NAMED)} of graph "
                f"{graph.name!r}, which holds state and computes nothing; leave its compute "
                "columns empty"
            )
            extra_names = [name for name in extra_names if name not in extra_state_names]
        if extra_names:
            names = join_names(extra_names, max_names=_MAX_NAMED)
            yield f"{kind} costs for {names}, which graph {graph.name!r} does not have"
