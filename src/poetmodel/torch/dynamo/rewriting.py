"""The planner of captured graphs: rewrites them by plans; records and reports the plans."""

from __future__ import annotations

import json
import logging
import weakref
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch._dynamo import config
from torch._guards import CompileContext

from poetmodel.errors import InputError, PoetModelError
from poetmodel.files import write_text
from poetmodel.torch.cache import digest, host_key
from poetmodel.torch.dynamo.costs import Profiles, load_machine_rates
from poetmodel.torch.dynamo.frontier import Frontier
from poetmodel.torch.dynamo.joint_rewriting import JointRewriter
from poetmodel.torch.dynamo.live_calls import LiveCalls
from poetmodel.torch.dynamo.pages import PageStore
from poetmodel.torch.dynamo.planning import (
    LOSS_OUTSIDE,
    MEASURED,
    BackendOptions,
    FirstCall,
    GraphPlan,
    GraphProblem,
    GraphRecord,
    OutsideMemory,
    plan,
    write_report_page,
)
from poetmodel.torch.dynamo.ranks import RankExchange
from poetmodel.torch.dynamo.steps import StepPlanner
from poetmodel.torch.dynamo.wrappers import (
    bucket_bytes,
    fsdp_gradients,
    fsdp_modes,
    gathered_bytes,
)
from poetmodel.torch.graph.tensors import interrupt_measurements
from poetmodel.torch.planning.progress import show_phases
from poetmodel.units import format_bytes, parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Hashable, Iterator, Sequence
    from typing import Self

    from torch import fx
    from torch.nn.parallel import DistributedDataParallel

    from poetmodel.torch.dynamo.joint_graph import JointGraph
    from poetmodel.torch.graph.profiles import OpProfile

FORMAT: Final = "poetmodel-backend"
VERSION: Final = 1

AUTO: Final = "auto"
"""Value of ``outside=``: the memory between both passes is measured in the first step."""
SHOW_AFTER_S: Final = 2.0
"""Time after which a terminal shows the progress of planning [s]."""

_LOG: Final = logging.getLogger(__name__)
_LOSS_REMEDY: Final = (
    "compile the function that returns the loss, or pass its size as outside=, or outside='auto', "
    "which measures it"
)
_SIZE_REMEDY: Final = "pass the size of memory outside the compiled functions as outside="
_CHECKPOINT_WARNING: Final = (
    "%s: its model checkpoints itself; the plan replaces these checkpoints, and ram=%s permits "
    "more: with everything kept it takes %s, with its own checkpoints %s; ram='eager' permits no "
    "more"
)
NO_GRAPH_TEXT: Final = (
    "no graph was compiled, and the functions ran without a budget: pass fullgraph=True to "
    "torch.compile"
)
"""Summary without any other line, for example if PyTorch never called the back end."""
REFUSED_ONLY_LINE: Final = "nothing ran, because the step was refused: "
"""Start of the summary after a refusal if no step was completed."""
CONCURRENT_LINE: Final = "calls that waited for their backward pass together: at most "
"""Start of a line of the summary if calls were live at the same time."""
REFUSED_LINE: Final = "a later call was refused, and its step was not completed: "
"""Start of a line of the summary if steps were completed before a refusal."""
_MEASURED_REMEDY: Final = "the first step, which may exceed the budget, measures it"
_RECOMPILE_WARNING: Final = (
    "a function was compiled for %d shapes or other values, and PyTorch refuses further ones: pad "
    "batches to few lengths, drop the last one if it is smaller (drop_last=True), or raise "
    "torch._dynamo.config.recompile_limit"
)


class Planned(NamedTuple):
    """The plan by which a graph is compiled, and the plans of its further calls."""

    graph_plan: GraphPlan
    frontier: Frontier | None
    """Plans of the graph; None if its calls have one plan."""


class RewrittenGraph(NamedTuple):
    """A graph in the order of its plan."""

    graph: fx.Graph
    saved_nodes: list[fx.Node]
    """Nodes that the forward pass saves for the backward pass."""
    planned: Planned
    plan_index: int
    """Position of the plan in the record."""


class GraphPlanner:
    """Plans and rewrites one graph after another within one budget; records plans and refusals.

    `storage` is a folder for pages. Kernels that a compiler generates (`is_generated`) retain
    predicted profiles. With `is_predicted` no graph is executed.
    """

    def __init__(
        self,
        settings: BackendOptions,
        storage: str | Path | None = None,
        *,
        is_generated: Callable[[fx.Node], bool] | None = None,
        is_predicted: bool = False,
    ) -> None:
        self.is_predicted = is_predicted
        self._graph_plans: list[GraphPlan] = []
        self._lock = Lock()
        """Held while a plan is added to this list."""
        self._unplanned_lines: list[str] = []
        """Lines of the summary about calls without a plan."""
        self.settings = settings
        self._profiles = Profiles(
            settings.cache, measures_times=settings.costs == MEASURED, is_generated=is_generated
        )
        self._pages = None if storage is None else PageStore(storage)
        self._first_keep_all_bytes: dict[Hashable, int] = {}
        """Keep-all peak of the first shape of each function [B]."""
        self._has_warned_about_loss = False
        """Whether the warning was logged that memory of the loss is not counted."""
        self._live = LiveCalls(settings.keep_all_fraction)
        self._live.wrapped_bytes = self._wrapped_bytes
        self._live.find_gradients = lambda: fsdp_gradients(self._fsdp_modules)
        self._live.find_modes = lambda: fsdp_modes(self._fsdp_modules)
        self._steps = StepPlanner(settings.keep_all_fraction, settings.stated_bytes)
        self._live.budget_bytes = settings.stated_bytes
        self._live.outside_bytes = self._stated_outside_memory().peak_bytes
        self._live.tell_step = lambda moments, modes: self._steps.tell(moments, modes, self._ranks)
        self._ranks = RankExchange(
            settings.time_limit_s, lambda: bool(self._replicas or self._fsdp_modules)
        )
        self._replicas: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        """DDP modules with compiled functions."""
        self._fsdp_modules = weakref.WeakKeyDictionary[torch.nn.Module, None]()
        """Modules sharded by FSDP2 with compiled functions, as keys: in the order of captures."""

    def __deepcopy__(self, _: object) -> Self:
        """Return a planner without plans, because a copied module compiles its graphs itself."""
        planner = type(self)(self.settings)
        shared_names = ("is_predicted", "_pages", "_profiles")
        vars(planner).update((name, vars(self)[name]) for name in shared_names)
        return planner

    @contextmanager
    def begin_call(
        self, inputs: Sequence[Any] = (), *, earlier_call: FirstCall | None = None, **changes: Any
    ) -> Iterator[FirstCall]:
        """Context manager around the planning of one call's graphs, with a common time limit.

        Parameters in `inputs` identify the function. `earlier_call` is repeated with a new time
        limit; `changes` replace its fields. Ends running measurements of outside memory.
        """
        interrupt_measurements()
        compile_id = CompileContext.current_compile_id()
        frame_id = None if compile_id is None else compile_id.frame_id
        if (
            compile_id is not None
            and (compile_id.frame_compile_id or 0) + 1 == config.recompile_limit
        ):
            _LOG.warning(_RECOMPILE_WARNING, config.recompile_limit)
        with show_phases(after_s=SHOW_AFTER_S) as show_phase:
            until_s = monotonic() + self.settings.time_limit_s
            if earlier_call is None:
                parameter_ids = (
                    id(value) for value in inputs if isinstance(value, torch.nn.Parameter)
                )
                earlier_call = FirstCall(
                    function=(frame_id, *parameter_ids),
                    first_keep_all_bytes=self._first_keep_all_bytes,
                    until_s=until_s,
                    outside=self._stated_outside_memory(),
                    ranks=self._ranks,
                )
            yield replace(earlier_call, until_s=until_s, show_phase=show_phase, **changes)

    def _wrapped_bytes(self, excluded_keys: Container[int] = ()) -> int:
        """Return the bytes of DDP's buckets and of FSDP2, as counted by `gathered_bytes` [B]."""
        ddp_bytes = sum(map(bucket_bytes, self._replicas))
        return (
            ddp_bytes + gathered_bytes(self._fsdp_modules, excluded_keys)
            if self._fsdp_modules
            else ddp_bytes
        )

    def _stated_outside_memory(self) -> OutsideMemory:
        """Return the memory outside of compiled functions by the option; zeros if not stated."""
        option = self.settings.outside
        if option is None or option == AUTO:
            return OutsideMemory()
        return OutsideMemory(peak_bytes=parse_size(option, field="outside"))

    @property
    def key(self) -> str:
        """Digest of budget, device, time limit, gap, host and keep-all peaks of first shapes."""
        settings = self.settings
        values = [str(settings.ram), str(settings.device), settings.time_limit_s, settings.gap]
        values += self._first_keep_all_bytes.values()  # they determine the budget of later shapes
        return digest(host_key(), *values)

    @property
    def plans(self) -> list[GraphRecord]:
        """One record for each plan of a graph, in the order of planning."""
        return [graph_plan.record for graph_plan in self._graph_plans]

    @contextmanager
    def record_refusals(self) -> Iterator[None]:
        """Context manager that records an error of this package as the last refusal."""
        try:
            yield
        except PoetModelError as error:
            self._live.record_refusal(str(error))
            raise

    @property
    def was_called(self) -> bool:
        """Whether a graph was compiled, or a call was refused since the last completed step."""
        return bool(self._graph_plans or self._unplanned_lines) or self._live.refusal is not None

    def summary(self) -> str:
        """Return one line for each plan: peak, budget, recomputed and paged tensors, overhead.

        Further lines describe calls without a plan, chosen plans of steps, and calls that waited
        together. A refusal is the last line until the next completed step. Without any line,
        returns `NO_GRAPH_TEXT`.
        """
        refusal, lines = self._live.refusal, [*map(str, self.plans), *self._unplanned_lines]
        lines += map(str, self._steps.choices)
        if self._live.concurrent_bytes:
            lines.append(CONCURRENT_LINE + format_bytes(self._live.concurrent_bytes))
        if refusal is not None:
            lines = (
                [*lines, REFUSED_LINE + refusal]
                if self._live.has_completed_step
                else [REFUSED_ONLY_LINE + refusal]
            )
        return "\n".join(lines) or NO_GRAPH_TEXT

    def report(self, path: str | Path) -> None:
        """Write a report about the graphs.

        Parameters
        ----------
        path : str or Path
            ``*.json``: the records of all plans; ``*.html``: a page about the schedule of the plan
            with the highest peak, which needs ``poetmodel[report]``.

        Raises
        ------
        InputError
            If there is no plan yet, the file cannot be written, or it has another suffix.
        MissingExtraError
            If a page is requested, and a library that draws it is not installed.
        """
        if not self._graph_plans:
            raise InputError(f"{path}: nothing to report; run the compiled function once before")
        suffix = Path(path).suffix
        if suffix == ".json":
            records = [record.to_dict() for record in self.plans]
            content = {"format": FORMAT, "version": VERSION, "plans": records}
            write_text(path, json.dumps(content, allow_nan=False, ensure_ascii=False) + "\n")
        elif suffix == ".html":
            largest_plan = max(
                self._graph_plans, key=lambda graph_plan: graph_plan.record.predicted_peak_bytes
            )
            write_report_page(path, largest_plan)
        else:
            raise InputError(f"{path}: expected a file *.html, a page, or *.json, the records")

    def rewrite(
        self,
        joint: JointGraph,
        call: FirstCall,
        planned: Planned | None = None,
        *,
        reserved_bytes: int = 0,
        plan_index: int | None = None,
    ) -> RewrittenGraph:
        """Rewrite a graph of a call by a plan, solved for unless `planned`; record and log it.

        The record replaces that of `plan_index` if given. `reserved_bytes` of the budget are for
        memory that it does not count [B].
        """
        if planned is None:
            if plan_index is None:
                name = f"graph {len(self._graph_plans)}{call.title}"
            else:
                name = self._graph_plans[plan_index].record.name
            profiles, agreed_call = self._agree_profiles(joint, call)
            planned = self._plan_graph(joint, profiles, name, agreed_call, reserved_bytes)
        graph_plan = planned.graph_plan
        with self._lock:
            if plan_index is None:
                plan_index = len(self._graph_plans)
            self._graph_plans[plan_index : plan_index + 1] = [graph_plan]
        self._log_plan(graph_plan)
        rewriter = JointRewriter(joint, -1 if self._pages is None else self._pages.number)
        new_graph = rewriter.rewrite(graph_plan.plan.program, graph_plan.inserted_node)
        return RewrittenGraph(new_graph, list(rewriter.saved_nodes), planned, plan_index)

    def _log_plan(self, graph_plan: GraphPlan) -> None:
        """Log a plan, and warn if it exceeds the model's own peak, or once of memory of a loss."""
        record = graph_plan.record
        _LOG.info("%s", record)
        if record.eager_bytes is not None and record.ram_budget_bytes > record.eager_bytes:
            _LOG.warning(
                _CHECKPOINT_WARNING,
                record.name,
                self.settings.ram,
                format_bytes(record.keep_all_bytes),
                format_bytes(record.eager_bytes),
            )
        if record.is_loss_missing and not self._has_warned_about_loss:
            self._has_warned_about_loss = True
            remedy = _LOSS_REMEDY if self.settings.outside is None else _MEASURED_REMEDY
            if graph_plan.inserted_node is not None:
                remedy = _SIZE_REMEDY
            _LOG.warning("%s: %s; %s", record.name, LOSS_OUTSIDE, remedy)

    def _agree_profiles(
        self, joint: JointGraph, call: FirstCall
    ) -> tuple[Sequence[OpProfile], FirstCall]:
        """Return (profiles of a graph, `call` with rates and bytes of DDP and FSDP2).

        Measures or loads them. Each process uses the largest values and smallest rates of all, so
        that all have one plan, valid in each. Predicted profiles are equal: `call` is unchanged.
        """
        if self.is_predicted:
            return [operation.profile for operation in joint.step_graph.operations], call
        call.show_phase("measuring operations")
        key = joint.training_graph().sha256  # by predicted sizes, which are equal in all processes
        profiles = self._profiles.find(joint)
        rates = None if self.settings.device else load_machine_rates(self.settings.cache)
        measurements = call.ranks.gather(key, (profiles, rates, call.wrapped_bytes))
        all_profiles, all_rates, wrapped_bytes = zip(*measurements, strict=True)
        profiles = [
            profile.with_maxima(other_profiles)
            for profile, *other_profiles in zip(profiles, *all_profiles, strict=True)
        ]
        if rates is not None:
            rates = tuple(map(min, zip(*all_rates, strict=True)))
        return profiles, replace(call, rates=rates, wrapped_bytes=max(wrapped_bytes))

    def _plan_graph(
        self,
        joint: JointGraph,
        profiles: Sequence[OpProfile],
        name: str,
        call: FirstCall,
        reserved_bytes: int,
    ) -> Planned:
        """Return the plan of a graph, and its frontier, which counts no outside memory.

        With concurrent calls, the plan is the frontier's `tight_plan`, whose peak may exceed the
        budget.
        """
        frontier = None
        options: dict[str, Any] = {
            "name": name,
            "call": call,
            "reserved_bytes": reserved_bytes,
            "is_predicted": self.is_predicted,
        }
        if not joint.is_inference and not self.is_predicted and not reserved_bytes:
            graph_options = options | {"call": replace(call, outside=OutsideMemory())}
            frontier = Frontier(
                GraphProblem.from_joint(joint, profiles, self.settings, **graph_options)
            )
        if frontier is None or not call.has_concurrent_calls:
            return Planned(plan(joint, profiles, self.settings, **options), frontier)
        if not call.ranks.is_alone:
            frontier.agree()
        stated_bytes = self.settings.stated_bytes
        if stated_bytes is not None:
            frontier.check_budget(stated_bytes)
        tight_plan = frontier.tight_plan
        budget_bytes = stated_bytes or tight_plan.record.predicted_peak_bytes
        record = replace(
            tight_plan.record,
            ram_budget_bytes=budget_bytes,
            outside_bytes=call.outside.peak_bytes or None,
            is_loss_missing=tight_plan.record.is_loss_missing and not any(call.outside),
        )
        return Planned(replace(tight_plan, record=record), frontier)
