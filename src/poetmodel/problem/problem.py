"""The stated problem: a graph, its costs, what is limited and what is minimized."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final, Self

from poetmodel.errors import shown
from poetmodel.graph import Floor, Graph, checkpoint_all_peak_bytes, floor
from poetmodel.problem.objective import (
    OBJECTIVES,
    OWN,
    DeadlineCounts,
    Objective,
    Quantity,
    Simulated,
    TimeSum,
    linear_limits,
    rewards_page_outs,
    stage_limits,
)
from poetmodel.problem.parse import resolve
from poetmodel.problem.rows import Coefficients, LinearRow
from poetmodel.problem.totals import Constraint, Terms, Total, TotalsBlock
from poetmodel.problem.working_graph import working_graph
from poetmodel.units import MAX_BYTES, brief, format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from poetmodel.budgets import Budget
    from poetmodel.device import Costs, CostTable
    from poetmodel.device.cost import Cost
    from poetmodel.problem.single_pass import SinglePass

_LIMITED_BY: Final[Mapping[Quantity, str]] = {
    Quantity.RAM: "ram",
    Quantity.TIME: "deadline",
    Quantity.ENERGY: "energy_budget",
    Quantity.WRITES: "aux_bytes",
}
"""The parameter that limits each quantity."""
FEWER_BYTES: Final = "fewer bytes written"
"""Name of the constraint of a problem whose written bytes must be below a value."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StandIn:
    """Other counts of a problem that is solved in place of a stated one.

    Such a problem is a surrogate (surrogate relaxation: Glover, 1968).
    """

    transfer_share: float | None = None
    """For a problem whose time is a makespan: how much of the transfer time counts beside all of
    the compute time, 0 to 1. Its time is ``compute + share * transfer``; the deadline limits that
    and the transfer time, and idle power beyond one pass is left out. With 0 it is a relaxation:
    its bounds hold. With 1 it is a restriction: a plan that transfers and computes one after the
    other keeps the deadline."""
    reference_value: float | None = None
    """The value of a valid schedule, above 0: the minimized quantity beyond what every schedule
    pays. Models state the quantity in thousandths of it, and whatever costs more than twice as much
    by itself as twice as much: only better schedules matter."""
    wants_page_outs: bool = False
    """Whether what was added to a model may want page-outs that no page-in needs."""


@dataclass(frozen=True, eq=False)
class Problem:
    """Problem: a graph, its costs, limits, and an objective.

    Parameters
    ----------
    graph : Graph
        The training graph.
    costs : Costs
        Time and energy of everything in it; may carry the device that gives the defaults below.
    ram : str or int, optional
        RAM budget: bytes, a size such as ``256KiB``, or a percentage of the keep-all peak
        (with `count_parameters` of peak plus resident bytes), as `poetmodel.budgets` says. Default:
        the device's RAM.
    deadline : str or float, optional
        Time limit of a step: seconds, a time such as ``20ms``, or a percentage of one computation
        of every node. Default: none.
    deadline_counts : {'compute', 'serial', 'overlap'}, optional
        Which time counts. Default: by the storage mode of the device, else ``serial``.
    aux_bytes : str or int, optional
        Auxiliary storage for paged-out tensors. Default: the device's, else unlimited.
    recompute, paging : bool
        Whether tensors may be recomputed, and paged.
    minimize : {'energy', 'time', 'ram', 'writes', 'own'}
        The objective; the other quantities stay limits. ``own`` is set by `minimizing`.
    energy_budget : str or float, optional
        Energy limit of a step: joules, an energy such as ``1.2Wh``, or a percentage of the
        baseline. Default: none.
    count_parameters : bool
        Whether parameters, gradients and optimizer state take room in the RAM budget.
    commit : int, optional
        After how many steps all replaced state is written to storage. A step pays its share of
        that. With more than 1, replaced state has its home in RAM. Default: never.
    constraints : tuple of Constraint
        Own constraints on the totals of a schedule; `subject_to` adds some.
    own_objective : tuple of (str, float)
        Own objective, by total; `minimizing` sets it.
    stand_in : StandIn
        What it counts otherwise; solvers set it with `surrogate`.

    Notes
    -----
    The parameters stay as they are given: ``dataclasses.replace`` with another graph takes a
    percentage anew. `resolved` makes them numbers.

    Raises
    ------
    BudgetError
        If a limit is not usable.
    CostError
        If the costs do not fit the graph.
    InputError
        For `count_parameters` of a graph with state tensors, which count in any case.

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
    ram: str | int | Budget | None = None
    deadline: str | float | None = None
    deadline_counts: str | None = None
    aux_bytes: str | int | None = None
    recompute: bool = True
    paging: bool = True
    minimize: str = "energy"
    energy_budget: str | float | None = None
    count_parameters: bool = False
    commit: int | None = None
    constraints: tuple[Constraint, ...] = ()
    own_objective: Terms = ()
    stand_in: StandIn = StandIn()

    ram_budget_bytes: int = field(init=False)
    """The RAM budget as given [B]."""
    deadline_s: float | None = field(init=False)
    """The deadline [s], if any."""
    aux_limit_bytes: int | None = field(init=False)
    """Room for paged-out tensors [B]; None means unlimited."""
    energy_budget_j: float | None = field(init=False)
    """The energy limit [J], if any."""

    def __post_init__(self) -> None:
        resolved = resolve(self)
        assign = partial(object.__setattr__, self)  # frozen for all others
        assign("costs", resolved.costs)
        assign("single_pass", resolved.single_pass)
        assign("constraints", resolved.constraints)
        assign("minimize", resolved.minimize)
        assign("deadline_counts", resolved.deadline_counts)
        assign("ram_budget_bytes", resolved.ram_budget_bytes)
        assign("deadline_s", resolved.deadline_s)
        assign("aux_limit_bytes", resolved.aux_limit_bytes)
        assign("energy_budget_j", resolved.energy_budget_j)

    def __repr__(self) -> str:
        device = self.costs.device
        where = "" if device is None else f"on {shown(device.short_name)}"
        deadline = "" if self.deadline_s is None else f"deadline {format_seconds(self.deadline_s)}"
        budget = f"RAM {format_bytes(self.ram_budget_bytes)}"
        return brief(
            self, shown(self.graph.name), where, budget, deadline, f"least {self.minimize}"
        )

    def __getstate__(self) -> dict[str, Any]:
        # What is derived is left out: another thread may be deriving it.
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def subject_to(self, **rules: Callable[[Any], Any]) -> Self:
        """Return the problem with further constraints on the totals of a schedule.

        Parameters
        ----------
        **rules
            By the name of the constraint, a function of a Pyomo block ``v`` of totals. It returns a
            linear relation, or a list of them. ``v.recomputations[k]`` is how often node `k` is
            computed beyond the first time, ``v.page_ins[i]`` and ``v.page_outs[i]`` how often
            tensor `i` is paged in and out, ``v.resident[i]`` whether state `i` has its home in RAM;
            `k` and `i` are positions or names. ``v.recomputations[t, k]`` and ``v.page_ins[t, i]``
            are 1 if that happens in stage `t`, the position or name of its node; sums of these take
            upper limits. ``v.bytes_written``, ``v.bytes_read`` [B], ``v.energy_j`` [J],
            ``v.compute_s`` and ``v.transfer_s`` [s] are those of a whole training step.

        Raises
        ------
        InputError
            If a rule gives no linear relation, or a name is taken.

        Examples
        --------
        >>> from poetmodel.graph import Graph, operation
        >>> from poetmodel.device import Costs
        >>> graph = Graph(name="pair", nodes=(operation("a", output_bytes=8),
        ...                                   operation("b", output_bytes=4, inputs=("a",))))
        >>> costs = Costs.from_arrays(graph, compute_time_s=[1, 1], compute_energy_j=[2, 3])
        >>> problem = Problem(graph, costs, ram=12)
        >>> problem.subject_to(once=lambda v: v.recomputations["a"] <= 0).constraints[0].to_dict()
        {'name': 'once', 'terms': {'recomputations:a': 1}, 'lower': None, 'upper': 0}
        """
        totals = TotalsBlock(self.graph)
        added = [row for name, rule in rules.items() for row in totals.constraints(rule, name)]
        return replace(self, constraints=(*self.constraints, *added))

    def minimizing(self, rule: Callable[[Any], Any]) -> Self:
        """Return the problem with another objective: a linear expression of totals.

        Parameters
        ----------
        rule : callable
            As in `subject_to`, but it returns an expression, which is minimized. Its gap refers to
            what lies above its value for a single pass; terms with negative coefficients count
            there as if they were at their largest.
        """
        terms = TotalsBlock(self.graph).expression(rule, "objective")
        return replace(self, minimize=OWN, own_objective=terms)

    def surrogate(self, **parameters: Any) -> Self:
        """Return the problem with these parameters of its `StandIn`, and the others it has."""
        return replace(self, stand_in=replace(self.stand_in, **parameters))

    def resolved(self) -> Self:
        """Return this problem with numbers (SI) for its limits.

        They keep their amounts where ``dataclasses.replace`` changes the graph or the costs.
        """
        return replace(
            self,
            ram=self.ram_budget_bytes,
            deadline=self.deadline_s,
            aux_bytes=self.aux_limit_bytes,
            energy_budget=self.energy_budget_j,
        )

    @property
    def can_page(self) -> bool:
        """Whether tensors can be paged: allowed, and there is storage.

        Storage of 0 bytes takes no page-out, but samples that lie there can still be paged in.
        """
        return self.paging and self.table.has_storage

    def may_recompute(self, k: int) -> bool:
        """Return whether node `k` may be computed a second time."""
        return self.recompute and self.graph.nodes[k].recomputable

    @property
    def resident_bytes(self) -> int:
        """Part of the budget for parameters, gradients and optimizer, if they count [B]."""
        return self.graph.total_resident_bytes if self.count_parameters else 0

    @property
    def usable_ram_bytes(self) -> int:
        """RAM for tensors and workspaces: the budget less what is resident [B]; may be negative."""
        return self.ram_budget_bytes - self.resident_bytes

    @property
    def reads_in_place(self) -> bool:
        """Whether the core reads state where it lies on storage (memory-mapped storage)."""
        device = self.costs.device
        return device is not None and device.is_memory_mapped

    @cached_property
    def working_graph(self) -> Graph:
        """The graph as decisions other than that on the homes of state see it.

        State lies on storage, like a sample; see `poetmodel.problem.working_graph`.
        """
        return working_graph(self.graph, read_in_place=self.reads_in_place)

    @cached_property
    def floor(self) -> Floor:
        """The largest working set of a step: no schedule needs less RAM for tensors."""
        return floor(self.graph, memory_mapped=self.reads_in_place, resident=not self.can_page)

    @property
    def useful_ram_bytes(self) -> int:
        """RAM that schedules can use: that for tensors, at most the keep-all peak [B]; above 0."""
        return max(1, min(self.usable_ram_bytes, checkpoint_all_peak_bytes(self.graph)))

    @cached_property
    def single_pass(self) -> SinglePass:
        """Time and energy of computing every node once."""
        return resolve(self).single_pass  # of an unpickled problem; others have it from the start

    @property
    def table(self) -> CostTable:
        """The costs in the graph's order."""
        return self.single_pass.table

    @property
    def idle_power_w(self) -> float:
        """Power drawn over the time that counts [W]."""
        return self.single_pass.idle_power_w

    @property
    def pass_compute_s(self) -> float:
        """Compute time of a single pass [s]."""
        return self.single_pass.compute_s

    @property
    def committing(self) -> Cost:
        """Cost of commits in a single pass: all replaced state is written to storage."""
        return self.single_pass.committing

    @property
    def pass_time_s(self) -> float:
        """Time that counts of a single pass [s]; see `SinglePass.time_s`."""
        return self.single_pass.time_s

    @property
    def baseline_energy_j(self) -> float:
        """Energy of a single pass, commits and idle power included [J]."""
        return self.single_pass.energy_j

    @property
    def asks_energy(self) -> bool:
        """Whether energies were asked for: minimized, limited, in an own sum, or of a device."""
        sums = (dict(self.own_objective), *(row.terms for row in self.constraints))
        return (
            self.minimize == Quantity.ENERGY
            or self.energy_budget is not None
            or self.costs.device is not None
            or any(Total.ENERGY in terms for terms in sums)
        )

    @cached_property
    def objective(self) -> Objective:
        """The quantity that is minimized."""
        return self.quantity(self.minimize)

    @cached_property
    def energy(self) -> Objective:
        """Energy, whether it is minimized or not."""
        return self.quantity(Quantity.ENERGY)

    @cached_property
    def totals(self) -> tuple[tuple[str, int], ...]:
        """The decisions that totals count: pairs of a field of `Coefficients` and an item."""
        tensors = len(self.graph.tensors)
        sizes = (len(self.graph.nodes), tensors, tensors, tensors)
        columns = zip(Coefficients._fields, sizes, strict=True)
        return tuple((field, item) for field, size in columns for item in range(size))

    @cached_property
    def linear_limits(self) -> tuple[LinearRow, ...]:
        """The limits on sums over decisions: deadline, energy budget and own constraints."""
        return tuple(linear_limits(self))

    @cached_property
    def stage_limits(self) -> tuple[LinearRow, ...]:
        """The own constraints that count in stages, as rows over decisions."""
        return tuple(stage_limits(self))

    @cached_property
    def counted_page_ins(self) -> frozenset[int]:
        """The tensors whose page-ins own constraints count in stages."""
        counted = (pair for row in self.stage_limits for pair in row.terms if pair[0])
        return frozenset(i for _, (family, (_, i)) in counted if family == "paged_in")

    @cached_property
    def wanted(self) -> Coefficients:
        """How much the limits and the objective want each decision: above 0 where one does.

        A constraint with a lower limit, or with a negative coefficient, can be kept by a
        recomputation or transfer that serves nothing else.
        """
        sums = [self.objective.coefficients, *(limit.coefficients for limit in self.linear_limits)]
        wanted = Coefficients(
            *(
                tuple(max(0.0, -min(values)) for values in zip(*columns, strict=True))
                for columns in zip(*sums, strict=True)
            )
        )
        return self._possible(wanted) if self.graph.state_tensors else wanted

    def _possible(self, wanted: Coefficients) -> Coefficients:
        """Return coefficients without transfers that state forbids, or that its home decides."""
        graph = self.graph
        fixed = {*graph.state_tensors, *graph.state_of}
        unread = fixed if self.reads_in_place else set(graph.state_of)
        return wanted._replace(
            page_in=tuple(0.0 if i in unread else c for i, c in enumerate(wanted.page_in)),
            page_out=tuple(0.0 if i in fixed else c for i, c in enumerate(wanted.page_out)),
        )

    def quantity(self, quantity: str) -> Objective:
        """Return a quantity, whether it is minimized or not, as this problem counts it."""
        objective, reference = OBJECTIVES[quantity](self), self.stand_in.reference_value
        if quantity == Quantity.TIME and self.stand_in.transfer_share is not None:
            counted = self.time_sum
            baseline = counted.of(self.pass_compute_s, self.committing.time_s)
            objective = replace(objective, counted=counted, baseline=baseline)
        if quantity == self.minimize and reference is not None and objective.is_sum:
            objective = replace(objective, reference=reference)
        return objective

    @property
    def counts_transfers(self) -> bool:
        """Whether transfers take time that counts one by one (meaning ``serial``)."""
        return self.deadline_counts == DeadlineCounts.SERIAL

    @property
    def is_overlapping(self) -> bool:
        """Whether time is the makespan of a plan whose transfers run beside the computing."""
        overlaps = self.deadline_counts == DeadlineCounts.OVERLAP
        return overlaps and self.stand_in.transfer_share is None

    @property
    def time_sum(self) -> TimeSum:
        """The sum that is minimized as time; for a makespan a lower bound of it, compute alone."""
        if self.stand_in.transfer_share is not None:
            return TimeSum(1.0, self.stand_in.transfer_share)
        return TimeSum(1.0, 1.0 if self.counts_transfers else 0.0)

    @cached_property
    def plans_all_transfers(self) -> bool:
        """Whether plans make all transfers of the schedules that matter.

        Page-outs that no page-in needs are left out where transfers run beside the computing: they
        take no time there.
        """
        wants = self.stand_in.wants_page_outs or rewards_page_outs(self)
        return self.deadline_counts != DeadlineCounts.OVERLAP or not wants

    @property
    def deadline_sums(self) -> tuple[TimeSum, ...]:
        """The sums that must each keep the deadline; for a makespan they are only necessary.

        While transfers run beside the computing, core and bus are each busy for the whole of their
        own work, and the deadline is no shorter than that.
        """
        beside = self.deadline_counts == DeadlineCounts.OVERLAP and self.plans_all_transfers
        return (self.time_sum, TimeSum(0.0, 1.0)) if beside else (self.time_sum,)

    def limited_times_s(self, simulation: Simulated) -> tuple[float, ...]:
        """Return the times of a schedule that must each keep the deadline [s]."""
        if self.stand_in.transfer_share is None:
            return () if simulation.time_s is None else (simulation.time_s,)
        compute_s, transfer_s = simulation.compute_s or 0.0, simulation.transfer_s or 0.0
        return tuple(counted.of(compute_s, transfer_s) for counted in self.deadline_sums)

    def without(self, *quantities: Quantity, **changes: Any) -> Self:
        """Return the problem without its limits on some quantities, and without a reference value.

        Parameters
        ----------
        *quantities : Quantity
            ``ram`` gets as much as any schedule that matters takes, ``writes`` all that could be
            paged out.
        **changes
            Further fields of the problem.
        """
        most = {
            Quantity.RAM: self._enough_ram_bytes,
            Quantity.WRITES: min(MAX_BYTES, sum(self.graph.tensor_bytes)),
        }
        freed: dict[str, Any] = {
            _LIMITED_BY[quantity]: most.get(quantity) for quantity in quantities
        }
        return replace(self.surrogate(reference_value=None), **freed | changes)

    @property
    def _enough_ram_bytes(self) -> int:
        """RAM beyond which more is of no use [B]; above 0.

        Keep-all has all that it takes, and nothing is better; where recomputations or transfers are
        wanted for their own sake, everything at once has.
        """
        graph = self.graph
        most = checkpoint_all_peak_bytes(graph)
        if any(map(any, self.wanted)):
            copies = zip(graph.output_bytes, graph.nodes, strict=True)
            once_more = max(size + node.workspace_bytes for size, node in copies)
            most = sum(graph.tensor_bytes) + once_more
        return min(MAX_BYTES, max(1, most) + self.resident_bytes)

    def below_bytes(self, value: int) -> Self:
        """Return the problem whose minimized bytes, peak RAM or written, must be below a value.

        State takes room on storage whether it is written or not: there a row of its own says so.
        """
        quantity = self.objective.quantity
        if quantity == Quantity.WRITES and self.graph.state_tensors:
            rows = tuple(row for row in self.constraints if row.name != FEWER_BYTES)
            terms: dict[str, float] = {Total.BYTES_WRITTEN: 1}
            fewer = Constraint(name=FEWER_BYTES, terms=terms, upper=value - 1)
            return replace(self, constraints=(*rows, fewer))
        more = self.resident_bytes if quantity == Quantity.RAM else 0
        changes: dict[str, Any] = {_LIMITED_BY[Quantity(quantity)]: value - 1 + more}
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return the stated limits and choices as plain values, SI."""
        rows = self.constraints
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
            **({} if self.commit is None else {"commit": self.commit}),
            **({"constraints": [row.to_dict() for row in rows]} if rows else {}),
            **({"weights": dict(self.own_objective)} if self.minimize == OWN else {}),
        }
