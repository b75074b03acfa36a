"""The shipped methods. To add one, write its function, and add a `Method` that cites its source."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pkgutil import resolve_name
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from poetmodel.units import brief

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

DEFAULT: Final = "optimal"
"""Default method of ``solve``."""


class Aware(StrEnum):
    """Degree to which a method has a property of Table 1 of POET (ICML 2022)."""

    YES = "✓"
    PARTLY = "~"
    NO = "×"  # noqa: RUF001 - the sign of the paper's table


class StateHomes(StrEnum):
    """Homes to which a method may assign the state of a graph."""

    DECIDED = "decided"
    """The method decides the home of each state tensor."""
    RAM = "RAM"
    """All state is in RAM."""
    STORAGE = "storage"
    """All state is on storage."""
    EITHER = "RAM or storage"
    """The best of: all state in RAM, all on storage, or some in RAM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A method: its name, its function, and the properties that comparisons show.

    A user-defined method has the defaults of all properties from `general_graphs` to `variant`.
    """

    name: str
    """Name for ``--method``, with the selected variant, if any."""
    summary: str
    """One-line description."""
    source: str
    """Authors, year and section of the publication, or another origin, such as ``own``."""
    assumptions: str
    """Assumptions about problem and device; empty for user-defined methods."""
    function_path: str
    """Import path of the function, ``module:name``; empty for user-defined methods."""
    general_graphs: Aware = Aware.NO
    """Whether the method accepts any graph (POET, ICML 2022, Table 1)."""
    compute_aware: Aware = Aware.NO
    """Whether the method takes compute times into account (Table 1)."""
    memory_aware: Aware = Aware.NO
    """Whether the method takes tensor sizes and the budget into account (Table 1)."""
    power_aware: Aware = Aware.NO
    """Whether the method takes energy into account (Table 1)."""
    state_homes: StateHomes = StateHomes.RAM
    """Homes of the state of a graph with state."""
    forward_only: bool = False
    """Whether the method recomputes only forward nodes; then graphs with state need one attempt."""
    not_for: str = ""
    """Graphs and devices to which the method does not apply, or for which it is pointless; empty if
    there are none."""
    pages: bool = False
    """Whether the method may page tensors."""
    recomputes: bool = False
    """Whether the method may recompute tensors."""
    uses_solver: bool = False
    """Whether a MILP solver computes the schedule."""
    variants: tuple[str, ...] = ()
    """Possible suffixes after a colon (``dtr:local``), passed as the function's second argument."""
    variant: str = ""
    """Selected variant, one of `variants`; empty for none."""
    user_function: Callable[..., Any] | None = field(default=None, compare=False)
    """Function of a user-defined method; None for methods of this package."""

    def __repr__(self) -> str:
        return brief(self, repr(self.name), self.summary)

    def function(self) -> Callable[..., Any]:
        """Return the method's function, with the selected variant bound.

        It is ``(problem) -> Schedule``; the schedule may violate limits, such as the deadline. For
        a method with `uses_solver`, it is ``(problem) -> Problem`` and returns the restricted
        problem to solve. The function raises `MethodNotApplicableError` if the method does not
        apply or finds no schedule.
        """
        if self.user_function is not None:
            return self.user_function
        function: Callable[..., Any] = resolve_name(self.function_path)
        return function if not self.variant else lambda problem: function(problem, self.variant)


_NO_STORAGE: Final = "Devices without storage, where the budget is below the keep-all peak."
_NO_CHAIN: Final = "Graphs whose backward pass is not the reverse of a chain of forward segments."
_NO_BACKWARD: Final = "Graphs without backward nodes, for which it returns keep-all."

_METHODS: Final = (
    Method(
        name="optimal",
        summary="recompute and page with minimum energy, proven (POET)",
        source="Patil et al., POET, ICML 2022, section 5",
        assumptions="one operation at a time; parameters and gradients that are not tensors "
        "of the graph are resident",
        function_path="poetmodel.baselines.running:optimal",
        general_graphs=Aware.YES,
        compute_aware=Aware.YES,
        memory_aware=Aware.YES,
        power_aware=Aware.YES,
        state_homes=StateHomes.DECIDED,
        pages=True,
        recomputes=True,
        uses_solver=True,
    ),
    Method(
        name="paging-only",
        summary="the MILP of optimal without recomputation",
        source="Patil et al., POET, ICML 2022, section 6.2 (ablation)",
        assumptions="as optimal",
        not_for=_NO_STORAGE,
        function_path="poetmodel.baselines.running:paging_only",
        general_graphs=Aware.YES,
        compute_aware=Aware.YES,
        memory_aware=Aware.YES,
        power_aware=Aware.YES,
        state_homes=StateHomes.DECIDED,
        pages=True,
        uses_solver=True,
    ),
    Method(
        name="recompute-only",
        summary="the MILP of optimal without paging",
        source="Patil et al., POET, ICML 2022, section 6.2 (ablation)",
        assumptions="as optimal",
        function_path="poetmodel.baselines.running:recompute_only",
        general_graphs=Aware.YES,
        compute_aware=Aware.YES,
        memory_aware=Aware.YES,
        power_aware=Aware.YES,
        recomputes=True,
        uses_solver=True,
    ),
    Method(
        name="resident",
        summary="the MILP of optimal with all state in RAM",
        source="this package (ablation); PyTorch, Checkmate and POET treat parameters in this way",
        assumptions="as optimal",
        function_path="poetmodel.baselines.running:resident",
        general_graphs=Aware.YES,
        compute_aware=Aware.YES,
        memory_aware=Aware.YES,
        power_aware=Aware.YES,
        pages=True,
        recomputes=True,
        uses_solver=True,
    ),
    Method(
        name="checkmate",
        summary="recompute with minimum compute time, proven",
        source="Jain et al., Checkmate, MLSys 2020, section 4",
        assumptions="no paging; minimizes compute time, not energy",
        function_path="poetmodel.baselines.running:checkmate",
        general_graphs=Aware.YES,
        compute_aware=Aware.YES,
        memory_aware=Aware.YES,
        recomputes=True,
        uses_solver=True,
    ),
    Method(
        name="checkmate-rounding",
        summary="round the checkpoints of checkmate's linear relaxation, recompute missing tensors",
        source="Jain et al., Checkmate, MLSys 2020, section 5",
        assumptions="as checkmate; rounding adds at most a tenth of the budget",
        function_path="poetmodel.baselines.rounding:checkmate_rounding",
        general_graphs=Aware.YES,
        compute_aware=Aware.YES,
        memory_aware=Aware.YES,
        recomputes=True,
        variants=("published", "deterministic", "randomized"),
    ),
    Method(
        name="checkpoint-all",
        summary="compute once, keep every tensor until its last use (PyTorch's default)",
        source="Patil et al., POET, ICML 2022, Table 1",
        assumptions="none",
        function_path="poetmodel.baselines.saved_sets:keep_all",
        general_graphs=Aware.YES,
    ),
    Method(
        name="chen-sqrt",
        summary="keep about sqrt(m) of m layers, recompute each segment once",
        source="Chen et al., Training deep nets with sublinear memory cost, 2016, section 3; "
        "linearized as in Jain et al., 2020, section 6.1",
        assumptions="segments of equal cost; a sequence of layers",
        not_for=_NO_BACKWARD,
        function_path="poetmodel.baselines.saved_sets:chen_sqrt",
        forward_only=True,
        recomputes=True,
    ),
    Method(
        name="chen-greedy",
        summary="close a segment when its tensors exceed a threshold, take the best threshold",
        source="Chen et al., Training deep nets with sublinear memory cost, 2016, algorithm 3; "
        "linearized as in Jain et al., 2020, section 6.1",
        assumptions="each segment is recomputed once; compute times are ignored",
        not_for=_NO_BACKWARD,
        function_path="poetmodel.baselines.saved_sets:chen_greedy",
        memory_aware=Aware.PARTLY,
        forward_only=True,
        recomputes=True,
    ),
    Method(
        name="min-cut",
        summary="save a minimum cut between forward and backward pass, recompute the rest once",
        source="PyTorch, functorch.compile.min_cut_rematerialization_partition, 2022, with the "
        "knapsack of its activation_memory_budget, 2024",
        assumptions="recomputed tensors stay until their last use",
        not_for=_NO_BACKWARD,
        function_path="poetmodel.baselines.saved_sets:min_cut",
        general_graphs=Aware.YES,
        compute_aware=Aware.PARTLY,
        memory_aware=Aware.PARTLY,
        forward_only=True,
        recomputes=True,
    ),
    Method(
        name="lower-sets",
        summary="save the boundaries of lower sets of the forward pass, recompute the rest once",
        source="Kusumoto et al., A graph theoretic framework of recomputation algorithms for "
        "memory-efficient backpropagation, NeurIPS 2019, section 4",
        assumptions="the backward pass of a segment needs the whole segment; gradients are as "
        "large as their tensors",
        not_for=_NO_BACKWARD,
        function_path="poetmodel.baselines.lower_sets:lower_sets",
        general_graphs=Aware.YES,
        compute_aware=Aware.YES,
        memory_aware=Aware.YES,
        forward_only=True,
        recomputes=True,
        variants=("exact", "pruned"),
    ),
    Method(
        name="griewank-walther",
        summary="revolve: binomial checkpointing, optimal on chains of unit cost",
        source="Griewank and Walther, ACM TOMS 26(1), 2000, Algorithm 799, section 2, "
        "doi 10.1145/347837.347846",
        assumptions="a chain of segments of equal time and size; other graphs are cut into "
        "segments at their articulation points",
        not_for=_NO_CHAIN,
        function_path="poetmodel.baselines.checkpointing:griewank_walther",
        forward_only=True,
        recomputes=True,
    ),
    Method(
        name="rotor",
        summary="optimal persistent checkpointing of chains with unequal layers",
        source="Beaumont et al., Optimal checkpointing for heterogeneous chains, 2019, "
        "arXiv:1911.13214, section 4",
        assumptions="a chain of segments, as griewank-walther; a checkpoint stays until its use",
        not_for=_NO_CHAIN,
        function_path="poetmodel.baselines.checkpointing:rotor",
        compute_aware=Aware.YES,
        memory_aware=Aware.YES,
        forward_only=True,
        recomputes=True,
    ),
    Method(
        name="pofo",
        summary="keep, recompute or offload each layer of a chain, transfers overlap computations",
        source="Beaumont et al., Efficient combination of rematerialization and offloading, "
        "NeurIPS 2021, section 4",
        assumptions="a chain of segments; one action per layer; page-outs end before the loss, "
        "page-ins begin after it",
        not_for=_NO_CHAIN,
        function_path="poetmodel.baselines.pofo:pofo",
        compute_aware=Aware.YES,
        memory_aware=Aware.YES,
        state_homes=StateHomes.EITHER,
        pages=True,
        forward_only=True,
        recomputes=True,
        variants=("published", "time", "energy"),
    ),
    Method(
        name="dtr",
        summary="evict online by cost over size times staleness, recompute on demand",
        source="Kirisame et al., DTR, ICLR 2021, section 4, and its simulator simrd",
        assumptions="later reads are unknown; with liveness, except those of the current stage",
        function_path="poetmodel.baselines.dtr:dtr",
        general_graphs=Aware.YES,
        compute_aware=Aware.YES,
        memory_aware=Aware.YES,
        recomputes=True,
        variants=("eq", "local", "msps", "lru", "size", "liveness"),
    ),
    Method(
        name="dtr-paging",
        summary="dtr:liveness with eviction to storage where that is cheaper",
        source="Kirisame et al., DTR, ICLR 2021, section 4, with page costs",
        assumptions="later reads are unknown",
        function_path="poetmodel.baselines.dtr:dtr_paging",
        general_graphs=Aware.YES,
        compute_aware=Aware.YES,
        memory_aware=Aware.YES,
        power_aware=Aware.YES,
        state_homes=StateHomes.EITHER,
        pages=True,
        recomputes=True,
    ),
    Method(
        name="capuchin",
        summary="swap tensors with the longest unused time; recompute if swapping stalls longer",
        source="Peng et al., Capuchin, ASPLOS 2020, section 4, doi 10.1145/3373376.3378505",
        assumptions="the accesses of the first step repeat",
        function_path="poetmodel.baselines.capuchin:capuchin",
        general_graphs=Aware.YES,
        compute_aware=Aware.YES,
        memory_aware=Aware.YES,
        state_homes=StateHomes.EITHER,
        pages=True,
        recomputes=True,
        variants=("published", "time", "energy"),
    ),
    Method(
        name="lru-paging",
        summary="demand paging: page out the least recently used tensor",
        source="least recently used replacement, as operating systems page: Denning, Virtual "
        "memory, ACM Computing Surveys 2(3), 1970, doi 10.1145/356571.356573",
        assumptions="later reads are unknown",
        not_for=_NO_STORAGE,
        function_path="poetmodel.baselines.paging:lru_paging",
        general_graphs=Aware.YES,
        memory_aware=Aware.YES,
        state_homes=StateHomes.EITHER,
        pages=True,
    ),
    Method(
        name="offload-all",
        summary="page every saved tensor out, and in again",
        source="Rhu et al., vDNN, MICRO 2016, section 3 (its 'all' policy)",
        assumptions="storage has space for every tensor that the backward pass reads",
        not_for="Devices without storage; graphs without backward nodes.",
        function_path="poetmodel.baselines.paging:offload_all",
        general_graphs=Aware.YES,
        state_homes=StateHomes.EITHER,
        pages=True,
    ),
    Method(
        name="zero-offload",
        summary="keep all state on storage, read it for each use and write it back",
        source="Ren et al., ZeRO-Offload, USENIX ATC 2021, sections 3 and 4; interpreted, as "
        "storage cannot compute",
        assumptions="activations fit in RAM; state is read for each use, written by its update",
        not_for="Graphs with state on devices without storage.",
        function_path="poetmodel.baselines.paging:zero_offload",
        general_graphs=Aware.YES,
        state_homes=StateHomes.STORAGE,
        pages=True,
    ),
    Method(
        name="swap-advisor",
        summary="search over sets of tensors to swap",
        source="Huang et al., SwapAdvisor, ASPLOS 2020, section 4, doi 10.1145/3373376.3378530",
        assumptions="a genetic search with a fixed seed",
        not_for=_NO_STORAGE,
        function_path="poetmodel.baselines.swap_advisor:swap_advisor",
        general_graphs=Aware.YES,
        compute_aware=Aware.YES,
        memory_aware=Aware.YES,
        state_homes=StateHomes.EITHER,
        pages=True,
    ),
)

METHODS: Final[Mapping[str, Method]] = MappingProxyType({entry.name: entry for entry in _METHODS})
"""All shipped methods by name, the default one first."""


def method_names() -> tuple[str, ...]:
    """Return the names of all shipped methods, the default one first."""
    return tuple(METHODS)
