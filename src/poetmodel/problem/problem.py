"""The stated problem: a graph, its costs, what is limited and what is minimized."""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from poetmodel.device import StorageMode
from poetmodel.errors import (
    BudgetError,
    InputError,
    shown,
)
from poetmodel.graph import checkpoint_all_peak_bytes
from poetmodel.units import (
    brief,
    format_bytes,
    format_seconds,
    parse_energy,
    parse_size,
    parse_time,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.device import Costs, CostTable
    from poetmodel.graph import Graph

RELATIVE_TOLERANCE: Final = 1e-9
"""Times and energies that differ by less than this, relatively, count as equal."""


SMALLEST_COST: Final = 1e-300
"""Least time or energy other than nothing: a thousandth of it is still a full number."""


class DeadlineCounts(StrEnum):
    """Which time a deadline limits."""

    COMPUTE = "compute"
    """Compute time alone (POET, ICML 2022, equation 3)."""
    SERIAL = "serial"
    """Compute plus transfer time: storage that blocks the core."""
    OVERLAP = "overlap"
    """The makespan when one DMA channel moves tensors while the core computes."""


class Quantity(StrEnum):
    """What a problem minimizes."""

    ENERGY = "energy"
    """Energy of one training step [J]."""
    TIME = "time"
    """Time of one training step, in the meaning of the deadline [s]."""
    RAM = "ram"
    """Peak RAM [B]."""
    WRITES = "writes"
    """Bytes paged out [B]."""


class TimeSum(NamedTuple):
    """A weighted sum of compute and transfer time."""

    compute: float
    """Weight of the time that the core computes."""
    transfer: float
    """Weight of the time that transfers take."""

    def of(self, compute_s: float, transfer_s: float) -> float:
        """Return the sum [s]."""
        return self.compute * compute_s + self.transfer * transfer_s


@dataclass(frozen=True, eq=False)
class Problem:
    """What to decide, within which limits, and what for.

    Parameters
    ----------
    graph : Graph
        The training graph.
    costs : Costs
        Time and energy of everything in it; may carry the device that gives the defaults below.
    ram : str or int, optional
        RAM budget: bytes, a size such as ``256KiB``, or a percentage of the checkpoint-all peak
        (with `count_parameters` of peak plus resident bytes). Default: the device's RAM.
    deadline : str or float, optional
        Time limit of a step: seconds, a time such as ``20ms``, or a percentage of one computation
        of every node. Default: none.
    deadline_counts : {'compute', 'serial', 'overlap'}, optional
        Which time counts. Default: by the storage mode of the device, else ``serial``.
    aux_bytes : str or int, optional
        Auxiliary storage for paged-out tensors. Default: the device's, else unlimited.
    recompute, paging : bool
        Whether tensors may be recomputed, and paged.
    minimize : {'energy', 'time', 'ram', 'writes'}
        The objective; the other quantities stay limits.
    energy_budget : str or float, optional
        Energy limit of a step: joules, an energy such as ``1.2Wh``, or a percentage of the
        baseline. Default: none.
    count_parameters : bool
        Whether parameters, gradients and optimizer state take room in the RAM budget.

    Raises
    ------
    BudgetError
        If a limit is not usable.
    CostError
        If the costs do not fit the graph.

    Examples
    --------
    >>> from poetmodel.graph import Graph, operation
    >>> from poetmodel.device import Costs
    >>> graph = Graph(name="pair", nodes=(operation("a", output_bytes=8),
    ...                                   operation("b", output_bytes=4, inputs=("a",))))
    >>> costs = Costs.from_arrays(graph, compute_time_s=[1, 1], compute_energy_j=[2, 3])
    >>> problem = Problem(graph, costs, ram="100%", deadline="150%")
    >>> problem.ram_budget_bytes, problem.deadline_s, problem.baseline_energy_j
    (12, 3.0, 5.0)
    """

    graph: Graph
    costs: Costs
    ram: str | int | None = None
    deadline: str | float | None = None
    deadline_counts: str | None = None
    aux_bytes: str | int | None = None
    recompute: bool = True
    paging: bool = True
    minimize: str = "energy"
    energy_budget: str | float | None = None
    count_parameters: bool = False

    table: CostTable = field(init=False, repr=False)
    """The costs in the graph's order."""
    ram_budget_bytes: int = field(init=False)
    """The RAM budget as given [B]."""
    deadline_s: float | None = field(init=False)
    """The deadline [s], if any."""
    aux_limit_bytes: int | None = field(init=False)
    """Room for paged-out tensors [B]; None means unlimited."""
    energy_budget_j: float | None = field(init=False)
    """The energy limit [J], if any."""
    stand_in_share: float | None = field(init=False, default=None, repr=False)
    """Set in what `stand_in` returns: the share of the transfer time that counts."""
    reference_value: float | None = field(init=False, default=None, repr=False)
    """Set in what `better_than` returns: the value of a known schedule."""

    def __repr__(self) -> str:
        device = self.costs.device
        place = "" if device is None else f"on {shown(device.key or device.name)}"
        deadline = "" if self.deadline_s is None else f"deadline {format_seconds(self.deadline_s)}"
        budget = f"RAM {format_bytes(self.ram_budget_bytes)}"
        return brief(
            self, shown(self.graph.name), place, budget, deadline, f"least {self.minimize}"
        )

    def __post_init__(self) -> None:
        _set(self, table=self.costs.table(self.graph))
        faults: list[str] = []
        for name, choices in (("minimize", Quantity), ("deadline_counts", DeadlineCounts)):
            value = getattr(self, name)
            if name == "deadline_counts" and value is None:
                value = self._default_meaning()
            if value not in tuple(choices):
                faults.append(f"{name}: expected one of {', '.join(choices)}, got {shown(value)}")
            else:
                _set(self, **{name: choices(value)})
        for name in ("recompute", "paging", "count_parameters"):
            if not isinstance(getattr(self, name), bool):
                faults.append(f"{name}: expected True or False, got {shown(getattr(self, name))}")
        faults += self._beyond_numbers()
        if faults:
            raise InputError(faults)
        for setter in (self._set_ram, self._set_deadline, self._set_storage, self._set_energy):
            try:
                setter()
            except BudgetError as error:
                faults.extend(error.faults)
        if faults:
            raise BudgetError(faults)

    def __reduce__(self) -> tuple[Any, ...]:
        given = ("graph", "costs", "ram", "deadline", "deadline_counts", "aux_bytes", "recompute")
        rest = ("paging", "minimize", "energy_budget", "count_parameters")
        values = tuple(getattr(self, name) for name in given + rest)
        return (_rebuild, (values, self.stand_in_share, self.reference_value))

    # -- what is allowed ---------------------------------------------------------------------

    @property
    def can_page(self) -> bool:
        """Whether tensors can be paged: allowed, and there is storage.

        Storage of 0 bytes takes no page-out, but samples that lie there can still be paged in.
        """
        return self.paging and self.table.has_storage

    @property
    def usable_ram_bytes(self) -> int:
        """RAM for tensors and workspaces: the budget less what is resident [B]; may be negative."""
        resident = self.graph.total_resident_bytes if self.count_parameters else 0
        return self.ram_budget_bytes - resident

    def may_recompute(self, k: int) -> bool:
        """Return whether node `k` may be computed a second time."""
        return self.recompute and self.graph.nodes[k].recomputable

    # -- figures -----------------------------------------------------------------------------

    @property
    def idle_power_w(self) -> float:
        """Power drawn over the time that counts [W]."""
        return self.costs.device.idle_power_w if self.costs.device is not None else 0.0

    @property
    def pass_time_s(self) -> float:
        """Compute time of a single pass [s]."""
        return sum(self.table.compute_time_s)

    @property
    def baseline_energy_j(self) -> float:
        """Energy of a single pass, idle power included [J]."""
        return sum(self.table.compute_energy_j) + self.idle_power_w * self.pass_time_s

    @property
    def counts_transfers(self) -> bool:
        """Whether transfers take time that counts one by one (meaning ``serial``)."""
        return self.deadline_counts == DeadlineCounts.SERIAL

    @property
    def is_overlapping(self) -> bool:
        """Whether time is the makespan of a plan whose transfers run beside the computing."""
        return self.deadline_counts == DeadlineCounts.OVERLAP and self.stand_in_share is None

    @property
    def time_sum(self) -> TimeSum:
        """The sum that is minimized as time; for a makespan a lower bound of it, compute alone."""
        if self.counts_transfers:
            return TimeSum(1.0, 1.0)
        return TimeSum(1.0, self.stand_in_share or 0.0)

    @property
    def deadline_sums(self) -> tuple[TimeSum, ...]:
        """The sums that must each keep the deadline; for a makespan they are only necessary.

        While transfers run beside the computing, core and bus are each busy for the whole of their
        own work, and the deadline is no shorter than that.
        """
        if self.deadline_counts == DeadlineCounts.OVERLAP:
            return (self.time_sum, TimeSum(0.0, 1.0))
        return (self.time_sum,)

    def stand_in(self, share: float) -> Problem:
        """Return a problem of sums that stands in for one whose time is a makespan.

        Parameters
        ----------
        share : float
            How much of the transfer time counts beside all of the compute time, 0 to 1. With 0 the
            stand-in is a relaxation: its bounds hold. With 1 it is a restriction: a plan that
            transfers and computes one after the other keeps the deadline.

        Returns
        -------
        Problem
            The same problem, with ``compute + share * transfer`` as its time, and the deadline on
            that and on the transfer time. Idle power beyond one pass is left out.
        """
        problem = copy(self)
        _set(problem, deadline_counts=DeadlineCounts.OVERLAP, stand_in_share=share)
        return problem

    def better_than(self, value: float) -> Problem:
        """Return the problem measured by the value of a known schedule.

        Its models state the minimized quantity in thousandths of that value, and whatever costs
        more than twice as much by itself as twice as much: only better schedules matter.

        Parameters
        ----------
        value : float
            Of a valid schedule, above 0: the minimized quantity beyond what every schedule pays.
        """
        problem = copy(self)
        _set(problem, reference_value=value)
        return problem

    def below_bytes(self, value: int) -> Problem:
        """Return the problem whose minimized bytes, peak RAM or written, must be below a value."""
        problem = copy(self)
        if self.minimize == Quantity.RAM:
            ram = self.ram_budget_bytes - self.usable_ram_bytes + value - 1
            _set(problem, ram=ram, ram_budget_bytes=ram)
        else:
            _set(problem, aux_bytes=value - 1, aux_limit_bytes=value - 1)
        return problem

    def without(self, *quantities: Quantity, **changes: Any) -> Problem:
        """Return the problem without its limits on some quantities.

        Parameters
        ----------
        *quantities : Quantity
            ``ram`` gets all that checkpoint-all takes, ``writes`` all that could be paged out.
        **changes
            Further fields of the problem.
        """
        freed: dict[str, Any] = {}
        for quantity in quantities:
            if quantity == Quantity.RAM:
                resident = self.ram_budget_bytes - self.usable_ram_bytes
                freed["ram"] = checkpoint_all_peak_bytes(self.graph) + resident
            elif quantity == Quantity.TIME:
                freed["deadline"] = None
            elif quantity == Quantity.ENERGY:
                freed["energy_budget"] = None
            else:
                freed["aux_bytes"] = sum(self.graph.tensor_bytes)
        return replace(self, **freed | changes)

    def compute_charge_j(self, k: int) -> float:
        """Return what one more computation of node `k` adds to the objective [J]."""
        idle = 0.0 if self.deadline_counts == DeadlineCounts.OVERLAP else self.idle_power_w
        return self.table.compute_energy_j[k] + idle * self.table.compute_time_s[k]

    def page_in_charge_j(self, i: int) -> float:
        """Return what paging tensor `i` in adds to the objective [J]."""
        idle = self.idle_power_w if self.counts_transfers else 0.0
        return self.table.page_in_energy_j[i] + idle * self.table.page_in_time_s[i]

    def page_out_charge_j(self, i: int) -> float:
        """Return what paging tensor `i` out adds to the objective [J]."""
        idle = self.idle_power_w if self.counts_transfers else 0.0
        return self.table.page_out_energy_j[i] + idle * self.table.page_out_time_s[i]

    def to_dict(self) -> dict[str, Any]:
        """Return the stated limits and choices as plain values, SI."""
        return {
            "ram_budget_bytes": self.ram_budget_bytes,
            "deadline_s": self.deadline_s,
            "deadline_counts": str(self.deadline_counts),
            "recompute": self.recompute,
            "paging": self.paging,
            "minimize": str(self.minimize),
            "energy_budget_j": self.energy_budget_j,
            "aux_bytes": self.aux_limit_bytes,
            "count_parameters": self.count_parameters,
        }

    def _beyond_numbers(self) -> Iterator[str]:
        """Name costs too small to be divided, and those that add up to more than a number holds."""
        table, times = self.table, len(self.graph.nodes)
        source = f"{self.costs.source}: " * bool(self.costs.source)
        nodes = [node.name for node in self.graph.nodes]
        tensors = [tensor.name for tensor in self.graph.tensors]
        for unit in ("time_s", "energy_j"):
            columns = [f"{what}_{unit}" for what in ("compute", "page_in", "page_out")]
            costs = [
                (cost, name, column)
                for column, names in zip(columns, (nodes, tensors, tensors), strict=True)
                for cost, name in zip(getattr(table, column), names, strict=False)
            ]
            tiny = [entry for entry in costs if 0 < entry[0] < SMALLEST_COST]
            for cost, name, column in tiny[:1]:
                yield f"{source}{name}: {column}: expected 0 or at least 1e-300, got {cost:g}"
            power_w = max(1.0, self.idle_power_w) if unit == "time_s" else 1.0
            if sum(cost for cost, _, _ in costs) * times * power_w == math.inf:
                cost, name, column = max(costs)
                yield (
                    f"{source}{name}: {column}: {cost:g} is too large: with the other costs, over "
                    f"{times} stages, it exceeds the largest number; give smaller figures"
                )

    # -- parsing -----------------------------------------------------------------------------

    def _default_meaning(self) -> DeadlineCounts:
        device = self.costs.device
        storage = device.storage if device is not None else None
        if storage is not None and storage.mode == StorageMode.DMA:
            return DeadlineCounts.OVERLAP
        return DeadlineCounts.SERIAL

    def _set_ram(self) -> None:
        whole = checkpoint_all_peak_bytes(self.graph)
        if self.count_parameters:
            whole += self.graph.total_resident_bytes
        value = self.ram
        if value is None:
            if self.costs.device is None:
                msg = "ram: a budget is needed where no device gives one, such as 256KiB or 50%"
                raise BudgetError(msg)
            value = self.costs.device.ram_bytes
        size = parse_size(value, field="ram", whole_bytes=whole)
        if size == 0:
            msg = f"ram: expected at least 1 byte, got {value!r}"
            raise BudgetError(msg)
        _set(self, ram_budget_bytes=size)

    def _set_deadline(self) -> None:
        if self.deadline is None:
            _set(self, deadline_s=None)
            return
        time_s = parse_time(self.deadline, field="deadline", whole_s=self.pass_time_s)
        if time_s == 0 and self.pass_time_s > 0:
            msg = f"deadline: expected a time above 0, got {self.deadline!r}"
            raise BudgetError(msg)
        _set(self, deadline_s=time_s)

    def _set_storage(self) -> None:
        device = self.costs.device
        if self.aux_bytes is not None:
            whole = checkpoint_all_peak_bytes(self.graph)
            limit: int | None = parse_size(self.aux_bytes, field="aux", whole_bytes=whole)
        else:
            limit = device.aux_bytes if device is not None else None
        _set(self, aux_limit_bytes=limit)

    def _set_energy(self) -> None:
        if self.energy_budget is None:
            _set(self, energy_budget_j=None)
            return
        energy_j = parse_energy(
            self.energy_budget, field="energy budget", whole_j=self.baseline_energy_j
        )
        if energy_j == 0 and self.baseline_energy_j > 0:
            msg = f"energy budget: expected an energy above 0, got {self.energy_budget!r}"
            raise BudgetError(msg)
        _set(self, energy_budget_j=energy_j)


def _rebuild(given: tuple[Any, ...], share: float | None, reference: float | None) -> Problem:
    problem = Problem(*given)
    _set(problem, reference_value=reference)
    return problem if share is None else problem.stand_in(share)


def deadline_slack_s(problem: Problem, counted: TimeSum) -> float | None:
    """Return the time that decisions may add to one pass [s], tolerance included; None if free."""
    if problem.deadline_s is None:
        return None
    return problem.deadline_s * (1 + RELATIVE_TOLERANCE) - counted.compute * problem.pass_time_s


def energy_slack_j(problem: Problem) -> float | None:
    """Return the energy that decisions may add to the baseline [J], tolerance included."""
    if problem.energy_budget_j is None:
        return None
    return problem.energy_budget_j * (1 + RELATIVE_TOLERANCE) - problem.baseline_energy_j


def within(value: float, limit: float | None) -> bool:
    """Return whether a time or energy keeps its limit, to the relative tolerance."""
    return limit is None or value <= limit + RELATIVE_TOLERANCE * abs(limit)


def _set(problem: Problem, **values: object) -> None:
    for name, value in values.items():
        object.__setattr__(problem, name, value)
