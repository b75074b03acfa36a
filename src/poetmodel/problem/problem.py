"""The stated problem: a graph, its costs, limits and an objective."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Self

from poetmodel.device import StorageMode
from poetmodel.device.costs import digest_costs
from poetmodel.errors import quote
from poetmodel.graph import Floor, Graph, checkpoint_all_peak_bytes, floor
from poetmodel.problem.limits import Limits, StatedProblem
from poetmodel.problem.objective import (
    Objective,
    SimulatedMetrics,
    energy_objective,
    linear_limits,
    may_reward_page_outs,
    ram_objective,
    stage_limits,
    time_objective,
    user_objective,
    writes_objective,
)
from poetmodel.problem.parse import LimitNumbers, resolve_problem
from poetmodel.problem.quantities import USER_OBJECTIVE, DeadlineCounts, Quantity, TimeSum
from poetmodel.problem.rows import Coefficients, LinearRow
from poetmodel.problem.totals import Terms, Total, TotalsBlock
from poetmodel.problem.working_graph import make_working_graph
from poetmodel.units import MAX_BYTES, brief, format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from poetmodel.device import Costs, CostTable
    from poetmodel.device.cost import Cost
    from poetmodel.problem.single_pass import SinglePass

_LIMIT_OF_QUANTITY: Final[Mapping[Quantity, str]] = {
    Quantity.RAM: "ram",
    Quantity.TIME: "deadline",
    Quantity.ENERGY: "energy_budget",
    Quantity.WRITES: "aux_bytes",
}
"""The parameter of `Problem` that limits each quantity."""


@dataclass(frozen=True, eq=False)
class Problem(StatedProblem):
    """A graph, its costs, limits, and an objective.

    Parameters
    ----------
    graph : Graph
        The training graph.
    costs : Costs
        Time and energy of its computations and transfers; may include the device that provides the
        defaults below.
    ram : str, int or Budget, optional
        RAM budget: bytes, a size such as ``256KiB``, or a percentage of the keep-all peak
        (with `count_parameters` of peak plus resident bytes); see `poetmodel.budgets`. Default:
        the device's RAM; required without a device.
    deadline : str or float, optional
        Time limit of a step: seconds, a time such as ``20ms``, or a percentage of the counted time
        of a single pass. Default: none.
    deadline_counts : {'compute', 'serial', 'overlap'}, optional
        The time that the deadline limits; see `DeadlineCounts`. Default: ``overlap`` for a device
        whose storage has DMA, else ``serial``.
    aux_bytes : str or int, optional
        Auxiliary storage for paged-out tensors and state on storage: bytes, a size such as
        ``1MiB``, or a percentage of the keep-all peak. Default: the device's, else unlimited.
    recompute, paging : bool
        Whether tensors may be recomputed, and paged.
    minimize : {'energy', 'time', 'ram', 'writes', 'own'}
        The objective; all limits remain. ``own`` is set by `minimizing`.
    energy_budget : str or float, optional
        Energy limit of a step: joules, an energy such as ``1.2Wh``, or a percentage of the
        baseline. Default: none.
    count_parameters : bool
        Whether the RAM budget includes parameters, gradients and optimizer state.
    commit : int, optional
        Number of steps between writes of all replaced state to storage. The costs of a step include
        its fraction of these writes. With more than 1, replaced state has its home in RAM, unless
        storage is volatile. Default: no writes. Replaces the `commit` of the costs.
    constraints : tuple of Constraint
        User-defined constraints on the totals of a schedule; `subject_to` adds to them.
    user_objective : tuple of (str, float)
        User-defined objective, by total; `minimizing` sets it.

    Notes
    -----
    Limits are stored as given: ``dataclasses.replace`` with another graph applies a percentage to
    the new graph. `resolved` converts them to numbers. The fields `costs`, `constraints`,
    `minimize` and `deadline_counts` are stored as parsed, with defaults and commits.

    Raises
    ------
    BudgetError
        If a limit is invalid, or `ram` is missing without a device.
    CostError
        If the costs do not match the graph.
    InputError
        If an option, a type or a user-defined sum is invalid, a cost is too small or too large, or
        for `count_parameters` of a graph with state tensors, which always count.

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
    numbers: LimitNumbers = field(init=False, repr=False)
    """The limits as numbers."""

    __eq__ = object.__eq__  # By identity: `Limits` compares limits alone.
    __hash__ = object.__hash__

    def __post_init__(self) -> None:
        """Validate the fields, and store the values of `resolve_problem`."""
        resolved = resolve_problem(self)
        # The class is frozen.
        for name in ("costs", "constraints", "minimize", "deadline_counts", "numbers"):
            object.__setattr__(self, name, getattr(resolved, name))
        self.__dict__["single_pass"] = resolved.single_pass

    @classmethod
    def from_limits(
        cls, graph: Graph, costs: Costs, limits: Limits, *, user_objective: Terms = ()
    ) -> Self:
        """Return the problem of a graph and its costs with stated limits.

        Parameters
        ----------
        graph : Graph
            The training graph.
        costs : Costs
            Time and energy of its computations and transfers.
        limits : Limits
            Limits, objective and allowed decisions.
        user_objective : tuple of (str, float)
            User-defined objective, by total; for ``minimize="own"``.

        Returns
        -------
        Problem
            The problem; `Problem` lists the errors that making it may raise.
        """
        values = ((entry.name, getattr(limits, entry.name)) for entry in fields(Limits))
        stated = {name: value for name, value in values if value is not None}
        return cls(graph, costs, **stated, user_objective=user_objective)

    def __repr__(self) -> str:
        """Return a text with graph, RAM budget and objective, and device and deadline if any."""
        device = self.costs.device
        device_text = "" if device is None else f"on {quote(device.short_name)}"
        deadline = "" if self.deadline_s is None else f"deadline {format_seconds(self.deadline_s)}"
        budget = f"RAM {format_bytes(self.ram_budget_bytes)}"
        return brief(
            self, quote(self.graph.name), device_text, budget, deadline, f"least {self.minimize}"
        )

    def __getstate__(self) -> dict[str, Any]:
        # Omit cached properties: another thread may be computing them.
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def subject_to(self, **rules: Callable[[Any], Any]) -> Self:
        """Return the problem with further constraints on the totals of a schedule.

        Parameters
        ----------
        **rules
            Functions by name of the constraint. Each receives a Pyomo block ``v`` of totals and
            returns a linear relation, or a list of them, which get the names ``name[0]`` and so on.
            ``v.recomputations[k]`` is the number of computations of node `k` after the first,
            ``v.page_ins[i]`` and ``v.page_outs[i]`` the number of page-ins and page-outs of tensor
            `i`, ``v.resident[i]`` is 1 if the home of state `i` is RAM; `k` and `i` are indices or
            names. ``v.recomputations[t, k]`` is 1 if `k` is recomputed in stage `t`,
            ``v.page_ins[t, i]`` if `i` is paged in there; `t` is an index or the name of the
            stage's node. A constraint on these two has an upper limit, no negative coefficients and
            no other totals. ``v.bytes_written``, ``v.bytes_read`` [B], ``v.energy_j`` [J],
            ``v.compute_s`` and ``v.transfer_s`` [s] are those of a whole training step.

        Raises
        ------
        InputError
            If a function uses an unknown total, returns no linear relation or one that no
            `Constraint` can state, if a name exists already, or if a constraint rewards energy
            while idle power counts over a makespan.

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
        new_rows = [
            row for name, function in rules.items() for row in totals.constraints(function, name)
        ]
        return replace(self, constraints=(*self.constraints, *new_rows))

    def minimizing(self, rule: Callable[[Any], Any]) -> Self:
        """Return the problem with another objective: a linear expression of totals.

        Parameters
        ----------
        rule : callable
            As in `subject_to`, but returns an expression, which is minimized. The gap is relative
            to the excess over `Objective.baseline`: the value of a single pass plus a lower bound,
            0 or less, on the sum of the terms with negative coefficients.

        Raises
        ------
        InputError
            If the function uses an unknown total, returns no linear expression of totals or one
            that counts by stage, or rewards energy while idle power counts over a makespan.
        """
        terms = TotalsBlock(self.graph).expression(rule, "objective")
        return replace(self, minimize=USER_OBJECTIVE, user_objective=terms)

    @property
    def ram_budget_bytes(self) -> int:
        """The RAM budget [B]."""
        return self.numbers.ram_budget_bytes

    @property
    def deadline_s(self) -> float | None:
        """The deadline [s]; None for none."""
        return self.numbers.deadline_s

    @property
    def aux_limit_bytes(self) -> int | None:
        """Storage for paged-out tensors and state on storage [B]; None for unlimited."""
        return self.numbers.aux_limit_bytes

    @property
    def energy_budget_j(self) -> float | None:
        """The energy limit [J]; None for none."""
        return self.numbers.energy_budget_j

    def resolved(self) -> Self:
        """Return this problem with numbers (SI) for its limits.

        Unlike percentages, numbers have the same values after ``dataclasses.replace`` changes graph
        or costs. Limits of the device become limits of the problem. A missing limit remains None.
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
        """Whether tensors can be paged: paging is allowed, and there is storage.

        Storage of 0 bytes accepts no page-outs, but its samples can be paged in.
        """
        return self.paging and self.table.has_storage

    def may_recompute(self, k: int) -> bool:
        """Return whether node `k` may be computed more than once."""
        return self.recompute and self.graph.nodes[k].recomputable

    @property
    def usable_ram_bytes(self) -> int:
        """RAM for tensors and workspaces: the budget minus resident bytes [B]; may be negative."""
        return self.ram_budget_bytes - self.resident_bytes

    @property
    def reads_in_place(self) -> bool:
        """Whether the core reads state from storage in place (memory-mapped storage)."""
        return self.single_pass.reads_in_place

    @cached_property
    def working_graph(self) -> Graph:
        """The graph for all decisions except homes of state.

        State is treated as a sample on storage; see `poetmodel.problem.working_graph`.
        """
        return make_working_graph(self.graph, read_in_place=self.reads_in_place)

    @cached_property
    def floor(self) -> Floor:
        """The minimum RAM: no schedule needs less for tensors and workspaces.

        It is the largest working set of one node; without `can_page`, plus all other state.
        """
        return floor(self.graph, memory_mapped=self.reads_in_place, resident=not self.can_page)

    @property
    def useful_ram_bytes(self) -> int:
        """The smaller of usable RAM and keep-all peak [B]; at least 1."""
        return max(1, min(self.usable_ram_bytes, checkpoint_all_peak_bytes(self.graph)))

    @cached_property
    def single_pass(self) -> SinglePass:
        """Time and energy of computing every node once."""
        # Reached only after unpickling or copying; otherwise __post_init__ sets the attribute.
        return resolve_problem(self).single_pass

    @property
    def table(self) -> CostTable:
        """The costs of the problem, with its commits, indexed by node and tensor."""
        return self.single_pass.table

    @property
    def costs_sha256(self) -> str:
        """SHA-256 of the costs of the problem; see `poetmodel.device.costs.digest_costs`."""
        return digest_costs(self.table, self.costs.device)

    @property
    def idle_power_w(self) -> float:
        """Power drawn during the counted time [W]; 0 without a device."""
        return self.single_pass.idle_power_w

    @property
    def pass_compute_s(self) -> float:
        """Compute time of a single pass [s]."""
        return self.single_pass.compute_s

    @property
    def commit_cost(self) -> Cost:
        """Cost per step of commits, which write all replaced state; 0 without commits."""
        return self.single_pass.commit_cost

    @property
    def pass_time_s(self) -> float:
        """Counted time of a single pass [s]; see `SinglePass.time_s`."""
        return self.single_pass.time_s

    @property
    def baseline_energy_j(self) -> float:
        """Energy of a single pass, including commits and idle power [J]."""
        return self.single_pass.energy_j

    @property
    def uses_energy(self) -> bool:
        """Whether energy is minimized, limited or in a user-defined sum, or costs have a device."""
        sums = (dict(self.user_objective), *(row.terms for row in self.constraints))
        return (
            self.minimize == Quantity.ENERGY
            or self.energy_budget is not None
            or self.costs.device is not None
            or any(Total.ENERGY in terms for terms in sums)
        )

    @cached_property
    def objective(self) -> Objective:
        """The quantity that is minimized."""
        return self.make_objective(self.minimize)

    @cached_property
    def energy(self) -> Objective:
        """Energy as an objective, whether it is minimized or not."""
        return self.make_objective(Quantity.ENERGY)

    @property
    def totals(self) -> tuple[tuple[str, int], ...]:
        """All decisions of `Coefficients`; see `SinglePass.totals`."""
        return self.single_pass.totals

    @cached_property
    def linear_limits(self) -> tuple[LinearRow, ...]:
        """The limits on sums over decisions: deadline, energy budget, user constraints.

        Per-stage constraints are in `stage_limits` instead.
        """
        return tuple(
            linear_limits(self.single_pass, self.numbers, self.deadline_sums, self.constraints)
        )

    @cached_property
    def stage_limits(self) -> tuple[LinearRow, ...]:
        """The per-stage user constraints, as rows over decisions."""
        return tuple(stage_limits(self.single_pass, self.constraints))

    @cached_property
    def counted_page_ins(self) -> frozenset[int]:
        """The tensors whose page-ins per-stage constraints count, with a coefficient above 0."""
        terms = (term for row in self.stage_limits for term in row.terms if term[0])
        return frozenset(i for _, (family, (_, i)) in terms if family == "paged_in")

    @cached_property
    def rewards(self) -> Coefficients:
        """Largest reward of each decision by a limit or the objective; 0 if none rewards it.

        A negative coefficient in the objective or an upper limit rewards a decision, and a positive
        one in a lower limit: then a recomputation or transfer that no other decision needs may
        help. A reward is the absolute coefficient; the largest is taken regardless of units.
        Transfers that state forbids, or that its home decides, have reward 0.
        """
        sums = [self.objective.coefficients, *(limit.coefficients for limit in self.linear_limits)]
        rewards = Coefficients(
            *(
                tuple(max(0.0, -min(values)) for values in zip(*columns, strict=True))
                for columns in zip(*sums, strict=True)
            )
        )
        return self._remove_forbidden_transfers(rewards) if self.graph.state_tensors else rewards

    def _remove_forbidden_transfers(self, rewards: Coefficients) -> Coefficients:
        """Return rewards with 0 for each transfer that state forbids or that its home decides."""
        graph = self.graph
        state_and_replacements = {*graph.state_tensors, *graph.state_of}
        unread_tensors = state_and_replacements if self.reads_in_place else set(graph.state_of)
        return rewards._replace(
            page_in=tuple(
                0.0 if i in unread_tensors else reward for i, reward in enumerate(rewards.page_in)
            ),
            page_out=tuple(
                0.0 if i in state_and_replacements else reward
                for i, reward in enumerate(rewards.page_out)
            ),
        )

    def make_objective(self, quantity: str) -> Objective:
        """Make the objective that minimizes `quantity`, as counted here."""
        if quantity == Quantity.ENERGY:
            return energy_objective(self.single_pass)
        if quantity == Quantity.TIME:
            return time_objective(self.single_pass, self.time_sum)
        if quantity == Quantity.RAM:
            return ram_objective(self.single_pass, self.floor.bytes, self.useful_ram_bytes)
        if quantity == Quantity.WRITES:
            return writes_objective(self.single_pass)
        return user_objective(self.single_pass, self.user_objective)

    @property
    def counts_transfers(self) -> bool:
        """Whether the counted time includes every transfer (``serial``)."""
        return self.deadline_counts == DeadlineCounts.SERIAL

    @property
    def is_overlapping(self) -> bool:
        """Whether the counted time is the makespan of a plan."""
        return self.counts_makespan

    @property
    def counts_makespan(self) -> bool:
        """Whether the deadline counts a makespan, also where a statement weights times instead."""
        return self.deadline_counts == DeadlineCounts.OVERLAP

    @property
    def counts_compute_alone(self) -> bool:
        """Whether the deadline counts no transfers."""
        return self.deadline_counts == DeadlineCounts.COMPUTE

    @property
    def transfer_mode(self) -> StorageMode:
        """Storage mode of plans: that of the device's storage.

        Without storage, ``dma`` if the deadline counts ``overlap``, else ``blocking``.
        """
        device = self.costs.device
        if device is not None and device.storage is not None:
            return device.storage.mode
        return StorageMode.DMA if self.counts_makespan else StorageMode.BLOCKING

    @property
    def time_sum(self) -> TimeSum:
        """The counted time as a weighted sum; for a makespan a lower bound, the compute time."""
        return TimeSum(1.0, 1.0 if self.counts_transfers else 0.0)

    @cached_property
    def plans_all_transfers(self) -> bool:
        """Whether plans execute all transfers of the relevant schedules.

        False if the deadline counts ``overlap`` and a limit or the objective may reward page-outs
        that no page-in needs: plans omit these page-outs. Without rewards, schedules with such
        page-outs are not relevant.
        """
        may_reward = may_reward_page_outs(self.single_pass, self.constraints, self.user_objective)
        return not self.counts_makespan or not may_reward

    @property
    def deadline_sums(self) -> tuple[TimeSum, ...]:
        """The sums of times that must each meet the deadline; for a makespan, necessary conditions.

        First `time_sum`. For ``overlap`` also the transfer time alone, since the makespan is at
        least the time of the bus; omitted if plans may omit transfers (`plans_all_transfers`).
        """
        # Also where a statement weighs times, so that it is not `is_overlapping`.
        limits_bus = self.counts_makespan and self.plans_all_transfers
        return (self.time_sum, TimeSum(0.0, 1.0)) if limits_bus else (self.time_sum,)

    def limited_times_s(self, simulation: SimulatedMetrics) -> tuple[float, ...]:
        """Return a simulation's times that must each meet the deadline [s]; () without costs."""
        return () if simulation.time_s is None else (simulation.time_s,)

    def with_limit(self, quantity: Quantity, amount: float | None) -> Self:
        """Return the problem with another limit on a quantity; None for none, or the device's."""
        limit: dict[str, Any] = {_LIMIT_OF_QUANTITY[quantity]: amount}
        return replace(self, **limit)

    def limit_on(self, quantity: Quantity) -> float | None:
        """Return the limit on a quantity as a number (SI); None for none."""
        numbers = (self.ram_budget_bytes, self.deadline_s, self.energy_budget_j)
        by_quantity = dict(zip(_LIMIT_OF_QUANTITY, (*numbers, self.aux_limit_bytes), strict=True))
        return by_quantity[quantity]

    def without_limits(self, *quantities: Quantity, **changes: Any) -> Self:
        """Return the problem without limits on `quantities`.

        Parameters
        ----------
        *quantities : Quantity
            For ``ram`` the budget becomes the maximum that any relevant schedule uses. For
            ``writes`` the storage becomes the size of all tensors. For ``time`` and ``energy``
            there is no limit. User constraints remain.
        **changes
            Changed fields of the problem, instead of those above.
        """
        max_bytes = {
            Quantity.RAM: self._max_useful_ram_bytes,
            Quantity.WRITES: min(MAX_BYTES, sum(self.graph.tensor_bytes)),
        }
        fields_without_limits: dict[str, Any] = {
            _LIMIT_OF_QUANTITY[quantity]: max_bytes.get(quantity) for quantity in quantities
        }
        return replace(self, **fields_without_limits | changes)

    @property
    def _max_useful_ram_bytes(self) -> int:
        """RAM budget above which no schedule improves [B]; includes resident bytes that count.

        The keep-all peak or, if any decision is rewarded, the size of all tensors plus one more
        computation.
        """
        graph = self.graph
        max_bytes = checkpoint_all_peak_bytes(graph)
        if any(map(any, self.rewards)):
            copies = zip(graph.output_bytes, graph.nodes, strict=True)
            max_copy_bytes = max(size + node.workspace_bytes for size, node in copies)
            max_bytes = sum(graph.tensor_bytes) + max_copy_bytes
        return min(MAX_BYTES, max(1, max_bytes) + self.resident_bytes)

    def to_dict(self) -> dict[str, Any]:
        """Return the limits and options as JSON values in SI units.

        A missing deadline, energy budget or storage limit is None. Commits, constraints and the
        weights of a user-defined objective occur only if there are any.
        """
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
            **({"weights": dict(self.user_objective)} if self.minimize == USER_OBJECTIVE else {}),
        }
