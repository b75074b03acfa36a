"""Time and energy of every operation and every transfer, measured or estimated."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from functools import partial
from numbers import Real
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from poetmodel.device.cost import FREE, Cost, PageCost
from poetmodel.device.generation import GenerationLayout
from poetmodel.device.profile import read_profile, write_profile
from poetmodel.errors import CostError, listed, shown
from poetmodel.units import brief

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from poetmodel.device.cores import CycleModel
    from poetmodel.device.hardware import Device
    from poetmodel.graph import Graph, Node


_MAX_NAMED: Final = 4
"""How many names one message lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Cost of a step so that all replaced state is on storage after every so many steps.

    A write that is a part of it costs what the page-out of a replacement does in the table: paid at
    the page-out where the state has its home on storage, else after all else.
    """

    parts: tuple[int, ...]
    """The replacements whose page-outs are a part of it."""
    rest: Cost
    """Cost beside these: erases, the record, and of volatile storage all state."""
    least: Mapping[int, Cost]
    """Least cost of each replacement: its write, and its share of the blocks."""
    written_bytes: int
    """Written bytes of a generation, checksums and record included, rounded up [B]."""
    erases: float
    """Blocks that it erases at most."""
    worn_blocks: float
    """Blocks that it erases on average, where several generations share a block."""
    generation_bytes: int
    """Size of a generation on storage, in whole blocks [B]; there are two at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """The costs of one graph by index of node (compute) or tensor (page), in seconds and joules.

    The page columns are empty where nothing can be paged.
    """

    compute_time_s: tuple[float, ...]
    compute_energy_j: tuple[float, ...]
    page_in_time_s: tuple[float, ...]
    page_in_energy_j: tuple[float, ...]
    page_out_time_s: tuple[float, ...]
    page_out_energy_j: tuple[float, ...]
    has_storage: bool
    """Whether tensors can be paged at all."""
    commit: Commit | None = None
    """Cost of commits, if there are any."""

    def __repr__(self) -> str:
        counts = f"{len(self.compute_time_s)} nodes, {len(self.page_in_time_s)} tensors"
        return brief(self, counts if self.has_storage else f"{counts}, no storage")

    def to_dict(self) -> dict[str, Any]:
        """Return the columns as lists; what commits take is no part of it."""
        names = [field.name for field in fields(self) if field.name != "commit"]
        columns = {name: getattr(self, name) for name in names}
        return {
            k: value if isinstance(value, bool) else list(value) for k, value in columns.items()
        }

    def compute_totals(self, times: Mapping[int, int]) -> Cost:
        """Return the cost of computing each node so many times."""
        return Cost(_total(times, self.compute_time_s), _total(times, self.compute_energy_j))

    def transfer_totals(self, page_ins: Mapping[int, int], page_outs: Mapping[int, int]) -> Cost:
        """Return the cost of paging each tensor so many times; nothing without storage."""
        if not self.has_storage:
            return FREE
        return Cost(
            _total(page_ins, self.page_in_time_s) + _total(page_outs, self.page_out_time_s),
            _total(page_ins, self.page_in_energy_j) + _total(page_outs, self.page_out_energy_j),
        )

    def commit_totals(self, paged_out: Collection[int] = ()) -> Cost:
        """Return the cost of a commit beside some page-outs; zero without commits."""
        if self.commit is None:
            return FREE
        apart = {new: 1 for new in self.commit.parts if new not in paged_out}
        written = self.transfer_totals({}, apart)
        rest = self.commit.rest
        return Cost(written.time_s + rest.time_s, written.energy_j + rest.energy_j)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs keyed by node and tensor name; `table` puts them in a graph's order.

    Examples
    --------
    >>> costs = Costs(compute={"a": Cost(1.0, 2.0)}, pages={"a": PageCost(FREE, FREE)})
    >>> costs.compute["a"].energy_j
    2.0
    """

    compute: Mapping[str, Cost]
    """One computation of each node."""
    pages: Mapping[str, PageCost] | None = None
    """Transfers of each tensor; None where there is no auxiliary storage."""
    device: Device | None = None
    """The device that gives RAM, storage size and mode, and idle power, where known."""
    source: str = field(default="", compare=False)
    """Where the figures come from, for messages."""
    commit: int | None = None
    """After how many steps all replaced state is written to storage; None: never."""
    cycles: CycleModel | None = field(default=None, compare=False)
    """How instructions became compute times; None if these are from another source."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "compute", MappingProxyType(dict(self.compute)))
        if self.pages is not None:
            object.__setattr__(self, "pages", MappingProxyType(dict(self.pages)))
        faults = list(_faults(self))
        if faults:
            raise CostError(faults)

    def __repr__(self) -> str:
        pages = "no storage" if self.pages is None else f"{len(self.pages)} tensors"
        device = "" if self.device is None else shown(self.device.short_name)
        return brief(self, f"{len(self.compute)} nodes, {pages}", device or shown(self.source))

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
            The device it was measured on. Where it has no storage, the page columns are not used.

        Raises
        ------
        CostError
            If the file cannot be read; with every fault found in it, each with its line.
        """
        content = read_profile(path)
        pages = None if device is not None and device.storage is None else content.pages
        return cls(compute=content.compute, pages=pages, device=device, source=str(path))

    def save(self, path: str | Path) -> None:
        """Write a profile, a CSV file of compute and page costs, which `load` reads."""
        write_profile(path, self.compute, self.pages or {})

    @classmethod
    def estimate(cls, graph: Graph, device: Device) -> Costs:
        """Estimate the costs of a graph on a device.

        Parameters
        ----------
        graph : Graph
            Gives FLOP and bytes, and of exported C instructions.
        device : Device
            Gives rates and powers.

        Returns
        -------
        Costs
            For every node of `graph`, and for every tensor where the device has storage.

        Notes
        -----
        An operation takes ``flops / flops_per_s``, or its memory traffic over the device's RAM
        bandwidth where that is given and longer; its energy is ``flops / flops_per_j`` where the
        device gives that, else time times power. A transfer takes its latency plus bytes over rate.

        An operation of exported C, on a Cortex-M with an FPU whose clock and power are known, takes
        its instructions over those of a cycle, over the clock, times the memory factor instead, and
        that time times the power. `cycles` has these figures.
        """
        if not hasattr(graph, "nodes"):
            raise CostError(f"graph: expected a Graph, got {shown(graph)}; Graph.load reads one")
        if not hasattr(device, "compute"):
            raise CostError(
                f"device: expected a Device, got {shown(device)}; Device.load reads one"
            )
        model, power_w, by_cycles = device.cycle_model, device.compute.power_w, False
        compute = {}
        for k, node in enumerate(graph.nodes):
            if node.instructions is not None and model is not None and power_w is not None:
                time_s, by_cycles = node.instructions / model.instructions_per_s, True
                compute[node.name] = Cost(time_s, time_s * power_w)
            elif not node.is_state:
                compute[node.name] = _estimate_node(graph, k, device)
        pages = None
        if device.storage is not None:
            into, out = device.storage.page_in, device.storage.page_out
            pages = {
                tensor.name: PageCost(
                    *(
                        Cost(way.time_s(tensor.bytes), way.time_s(tensor.bytes) * way.power_w)
                        for way in (into, out)
                    )
                )
                for tensor in graph.tensors
            }
        source = f"device {device.short_name}"
        cycles = model if by_cycles else None
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
            Gives the names.
        compute_time_s, compute_energy_j : sequence of float, one per node
            Costs of one computation [s], [J]; 0 for a node that holds state.
        page_in, page_out : sequence of (time, energy), one per tensor, optional
            Costs of one transfer [s], [J]; without them nothing can be paged.
        device : Device, optional
            As the field.

        Returns
        -------
        Costs
            The same figures, by name.

        Raises
        ------
        CostError
            If a figure is negative or not finite, or only one of `page_in`, `page_out` is given.
        ValueError
            If a sequence is not as long as the graph has nodes or tensors.
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
                tensor.name: PageCost(Cost(*map(float, into)), Cost(*map(float, out)))
                for tensor, into, out in zip(graph.tensors, page_in, page_out, strict=True)
            }
        return cls(compute=compute, pages=pages, device=device)

    def table(self, graph: Graph) -> CostTable:
        """Put the costs in a graph's order.

        Raises
        ------
        CostError
            If a node or tensor has no costs, or costs name something that the graph lacks.
        """
        faults = list(_mismatch(self, graph))
        if faults:
            raise CostError(f"{self.source}: {fault}" if self.source else fault for fault in faults)
        compute = [FREE if node.is_state else self.compute[node.name] for node in graph.nodes]
        pages = [] if self.pages is None else [self.pages[t.name] for t in graph.tensors]
        written = [page.page_out for page in pages]
        commit = None
        if self.commit is not None and self.pages is not None and graph.state_of:
            commit, parts = _commit(graph, written, self.device, every=self.commit)
            written = [parts.get(i, cost) for i, cost in enumerate(written)]
        return CostTable(
            compute_time_s=tuple(cost.time_s for cost in compute),
            compute_energy_j=tuple(cost.energy_j for cost in compute),
            page_in_time_s=tuple(cost.page_in.time_s for cost in pages),
            page_in_energy_j=tuple(cost.page_in.energy_j for cost in pages),
            page_out_time_s=tuple(cost.time_s for cost in written),
            page_out_energy_j=tuple(cost.energy_j for cost in written),
            has_storage=self.pages is not None,
            commit=commit,
        )


def _commit(
    graph: Graph, page_outs: Sequence[Cost], device: Device | None, *, every: int
) -> tuple[Commit, dict[int, Cost]]:
    """Return the cost of commits in a step, and of it the writes of replacements, by tensor.

    Flash is written at its rate, and a generation erases the blocks that it takes. On other storage
    a tensor costs what its page-out does; blocks that it erases are a part of that.
    """
    layout, share = GenerationLayout.on(device), 1 / every
    sizes = {i: graph.tensor_bytes[i] for i in sorted(graph.state_of)}
    storage = None if device is None else device.storage
    flash = None if device is None or not device.commits_to_flash else device.flash
    blocks = layout.blocks(sizes.values())

    def written(size_bytes: int, page_out: Cost = FREE, paid_bytes: int = 0) -> Cost:
        """Return the cost of a write, of which a page-out pays some bytes."""
        if flash is not None:
            time_s, power_w = flash.write_s(size_bytes, 0), flash.power_w
        elif storage is not None:
            way, power_w = storage.page_out, storage.page_out.power_w
            time_s = (size_bytes - paid_bytes) / way.bytes_per_s
        else:
            time_s = power_w = 0.0
        paid = FREE if flash is not None else page_out
        return Cost(share * (paid.time_s + time_s), share * (paid.energy_j + time_s * power_w))

    parts = {i: written(layout.padded(m), page_outs[i], m) for i, m in sizes.items()}
    least = parts
    quickest = min(page_outs, key=attrgetter("time_s"))
    ends = [written(size_bytes, quickest) for size_bytes in layout.end_bytes]
    rest = Cost(sum(end.time_s for end in ends), sum(end.energy_j for end in ends))
    if flash is not None:
        volatile = device is not None and device.is_volatile
        rest = written(layout.size_bytes(sizes.values() if volatile else ()))
        erased_s = share * flash.write_s(0, blocks)
        rest = Cost(rest.time_s + erased_s, rest.energy_j + erased_s * flash.power_w)
        block_s = share * flash.write_s(0, 1) / layout.erase_block_bytes
        shares_s = {i: block_s * layout.padded(m) for i, m in sizes.items()}
        least = {
            i: Cost(cost.time_s + shares_s[i], cost.energy_j + shares_s[i] * flash.power_w)
            for i, cost in parts.items()
        }
        parts = {} if volatile else parts
    commit = Commit(
        parts=tuple(parts),
        rest=rest,
        least=least,
        written_bytes=math.ceil(share * layout.size_bytes(sizes.values())),
        erases=share * blocks,
        worn_blocks=share * blocks / layout.in_one_block(tuple(sizes.values())),
        generation_bytes=blocks * layout.erase_block_bytes,
    )
    return commit, parts


def _total(times: Mapping[int, int], costs: Sequence[float]) -> float:
    return sum(times[index] * costs[index] for index in sorted(times) if times[index])


def _estimate_node(graph: Graph, k: int, device: Device) -> Cost:
    node = graph.nodes[k]
    compute = device.compute
    time_s = node.flops / compute.flops_per_s
    if compute.bytes_per_s is not None:
        time_s = max(time_s, bytes_moved(graph, k, node) / compute.bytes_per_s)
    if compute.flops_per_j is not None:
        return Cost(time_s, node.flops / compute.flops_per_j)
    return Cost(time_s, time_s * (compute.power_w or 0.0))


def bytes_moved(graph: Graph, k: int, node: Node) -> int:
    """Return the memory traffic of one execution of node `k` [B]."""
    if node.bytes_moved is not None:
        return node.bytes_moved
    return node.output_bytes + sum(graph.tensor_bytes[i] for i in graph.inputs_of[k])


def _faults(costs: Costs) -> Iterator[str]:
    for name, cost in costs.compute.items():
        yield from _cost_fault(f"{name}: compute", cost)
    for name, page in (costs.pages or {}).items():
        yield from _cost_fault(f"{name}: page_in", page.page_in)
        yield from _cost_fault(f"{name}: page_out", page.page_out)


def _cost_fault(where: str, cost: Cost) -> Iterator[str]:
    for quantity in ("time_s", "energy_j"):
        value: Any = getattr(cost, quantity)
        good = isinstance(value, Real) and not isinstance(value, bool)
        if not good or not 0 <= value < math.inf:
            yield f"{where}_{quantity}: expected a finite number >= 0, got {shown(value)}"


def _mismatch(costs: Costs, graph: Graph) -> Iterator[str]:
    state = {graph.nodes[graph.node_of[i]].name for i in graph.state_tensors}
    computing = [name for name in graph.node_index if name not in state]
    compared: list[tuple[str, str, Mapping[str, object], Collection[str]]] = [
        ("compute", "node", costs.compute, computing)
    ]
    if costs.pages is not None:
        compared.append(("page", "tensor", costs.pages, graph.tensor_index))
    for kind, owner, given, wanted in compared:
        missing = [shown(name) for name in wanted if name not in given]
        if missing:
            yield (
                f"no {kind} costs for {listed(missing, most=_MAX_NAMED)} of graph {graph.name!r}; "
                f"every {owner} needs a row with the {kind} columns"
            )
        known = frozenset(wanted)
        extra = [shown(name) for name in given if name not in known]
        computed = [shown(name) for name in given if kind == "compute" and name in state]
        if computed:
            yield (
                f"compute costs for {listed(computed, most=_MAX_NAMED)} of graph {graph.name!r}, "
                "which holds state and computes nothing; leave its compute columns empty"
            )
            extra = [name for name in extra if name not in computed]
        if extra:
            names = listed(extra, most=_MAX_NAMED)
            yield f"{kind} costs for {names}, which graph {graph.name!r} does not have"
