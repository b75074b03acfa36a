"""Graphs rewritten in the order of their plans, and records and reports of the plans."""

from __future__ import annotations

import json
import logging
import weakref
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._dynamo import config
from torch._guards import CompileContext

from poetmodel.errors import InputError, PoetModelError
from poetmodel.files import write_text
from poetmodel.torch.cache import digest, host_key
from poetmodel.torch.compiled import show_phases
from poetmodel.torch.dynamo.costs import Profiles, machine_rates
from poetmodel.torch.dynamo.frontier import Frontier
from poetmodel.torch.dynamo.joint_rewriting import JointRewriter
from poetmodel.torch.dynamo.live_calls import LiveCalls
from poetmodel.torch.dynamo.outside import end_measurements
from poetmodel.torch.dynamo.pages import SlotFile
from poetmodel.torch.dynamo.planning import (
    LOSS_OUTSIDE,
    MEASURED,
    BackendOptions,
    FirstCall,
    GraphPlan,
    GraphProblem,
    Outside,
    PlanRecord,
    plan,
    write_page,
)
from poetmodel.torch.dynamo.ranks import Ranks
from poetmodel.torch.dynamo.steps import StepPlanner
from poetmodel.torch.dynamo.wrappers import bucket_bytes, gathered_bytes
from poetmodel.units import format_bytes, parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Hashable, Iterator, Sequence

    from torch import fx
    from torch.nn.parallel import DistributedDataParallel

    from poetmodel.torch.dynamo.joint_graph import JointGraph
    from poetmodel.torch.graph.profiles import OpProfile

FORMAT: Final = "poetmodel-backend"
VERSION: Final = 1

AUTO: Final = "auto"
"""Value of ``outside=``: the memory between both passes is measured in the first step."""
SILENT_S: Final = 2.0
"""Time after which a terminal shows the current stage of a call [s]."""

_LOG: Final = logging.getLogger(__name__)
_RETURN_IT: Final = (
    "compile the function that returns the loss, or pass its size as outside=, or outside='auto', "
    "which measures it"
)
_STATE_IT: Final = "pass the size of memory outside the compiled functions as outside="
_CHECKPOINTED: Final = (
    "%s: its model checkpoints itself; the plan replaces these checkpoints, and ram=%s permits "
    "more: with everything kept it takes %s, with its own checkpoints %s; ram='eager' permits no "
    "more"
)
NO_GRAPH: Final = (
    "no graph was compiled, and the functions ran without a budget: pass fullgraph=True to "
    "torch.compile"
)
"""Summary if PyTorch never called the back end."""
NOTHING_RAN: Final = "nothing ran, because the step was refused: "
"""Summary after a refusal, instead of plans that were not executed."""
TOGETHER: Final = "calls that waited for their backward pass together: at most "
"""Line of the summary if several calls were live at once."""
REFUSED: Final = "a later call was refused, and its step was not completed: "
"""Line of the summary if steps were completed before a refusal."""
_FIRST_STEP: Final = "the first step, which may exceed the budget, measures it"
_MANY: Final = (
    "a function was compiled for %d shapes or other values, and PyTorch refuses further ones: pad "
    "batches to few lengths, drop the last one if it is smaller (drop_last=True), or raise "
    "torch._dynamo.config.recompile_limit"
)


class GraphPlanner:
    """Plans one graph after another within one budget, and records plans and refusals.

    Parameters
    ----------
    settings : BackendOptions
        Budget and options.
    storage : str or Path, optional
        Folder for pages.
    is_generated : callable, optional
        Whether a compiler generates the kernel of a node; by default all kernels are PyTorch's.
    is_predicted : bool
        Whether no graph is executed, and all tensors have the sizes that PyTorch predicts.
    """

    def __init__(
        self,
        settings: BackendOptions,
        storage: str | Path | None = None,
        *,
        is_generated: Callable[[fx.Node], bool] | None = None,
        is_predicted: bool = False,
    ) -> None:
        """Create the file for pages, if any, and the counter of live calls."""
        self._is_predicted = is_predicted
        self._planned: list[GraphPlan] = []
        self._settings = settings
        self._profiles = Profiles(
            settings.cache, timed=settings.costs == MEASURED, is_generated=is_generated
        )
        self._file = None if storage is None else SlotFile(storage)
        self._first_bytes: dict[Hashable, int] = {}
        self._call: FirstCall | None = None
        self._has_warned = False
        self._live = LiveCalls(settings.keep_all_fraction)
        self._live.wrapped_bytes = self._wrapped_bytes
        self._steps = StepPlanner(settings.keep_all_fraction, settings.stated_bytes)
        self._live.budget_bytes = settings.stated_bytes
        self._live.outside_bytes = self._outside().peak_bytes
        self._ranks = Ranks(settings.time_limit)
        self._frontier: Frontier | None = None
        """Plans of the graph that was captured last."""
        self._replicas: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        """DDP modules with compiled functions."""
        self._sharded: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        """Modules sharded by FSDP2 with compiled functions."""

    @contextmanager
    def first_call(
        self, inputs: Sequence[Any] = (), *, before: FirstCall | None = None, **changes: Any
    ) -> Iterator[FirstCall]:
        """Context manager around the planning of one call's graphs, with a common time limit.

        A terminal shows the current stage. Graphs of the same code and parameters are shapes of
        one function. `before` repeats an earlier call, with `changes` of its fields. Nested uses
        yield the outer call.
        """
        if self._call is not None:
            yield self._call
            return
        end_measurements()
        number = CompileContext.current_compile_id()
        frame = None if number is None else number.frame_id
        if number is not None and (number.frame_compile_id or 0) + 1 == config.recompile_limit:
            _LOG.warning(_MANY, config.recompile_limit)
        with show_phases(after_s=SILENT_S) as show_phase:
            until_s = monotonic() + self._settings.time_limit
            if before is None:
                parameters = (id(x) for x in inputs if isinstance(x, torch.nn.Parameter))
                before = FirstCall(
                    function=(frame, *parameters),
                    first_bytes=self._first_bytes,
                    until_s=until_s,
                    outside=self._outside(),
                )
            changes = {"share": self._share, "gather": self._gather, **changes}
            self._call = replace(before, until_s=until_s, show_phase=show_phase, **changes)
            try:
                yield self._call
            finally:
                self._call = None

    def _wrapped_bytes(self, excluded: Container[int] = ()) -> int:
        """Return the bytes of DDP and FSDP2 except in `excluded` storages [B]."""
        size = sum(map(bucket_bytes, self._replicas))
        return size + gathered_bytes(self._sharded, excluded) if self._sharded else size

    def _share(self, key: str, make: Callable[[], Any]) -> Any:
        """Return the first process's result of `make` if DDP or FSDP2 is used, else our own."""
        if self._replicas or self._sharded:
            return self._ranks.share(key, make)
        return make()

    def _gather(self, key: str, value: Any) -> list[Any]:
        """Return the values of all processes if DDP or FSDP2 is used, else only `value`."""
        if self._replicas or self._sharded:
            return self._ranks.gather(key, value)
        return [value]

    def _outside(self) -> Outside:
        """Return the stated memory outside of compiled functions; zeros if it will be measured."""
        option = self._settings.outside
        if option is None or option == AUTO:
            return Outside()
        return Outside(peak_bytes=parse_size(option, field="outside"))

    @property
    def key(self) -> str:
        """Digest of the options and the host, on which all plans depend."""
        settings = self._settings
        values = [str(settings.ram), str(settings.device), settings.time_limit, settings.gap]
        values += self._first_bytes.values()  # later shapes have the budget of these
        return digest(host_key(), *values)

    @property
    def plans(self) -> list[PlanRecord]:
        """One record for each graph, in the order of capture."""
        return [planned.record for planned in self._planned]

    @contextmanager
    def recording_refusals(self) -> Iterator[None]:
        """Context manager that records an error of this package as the latest refusal."""
        try:
            yield
        except PoetModelError as error:
            self._live.record_refusal(str(error))
            raise

    @property
    def was_called(self) -> bool:
        """Whether a graph was planned or a call refused."""
        return bool(self._planned) or self._live.refusal is not None

    def summary(self) -> str:
        """Return one line per graph: peak, budget, recomputed and paged tensors, overhead.

        After a refusal its reason is the last line, or the only line if no step was completed.
        """
        refusal, lines = self._live.refusal, [*map(str, self.plans)]
        lines += map(str, self._steps.choices)
        if self._live.together_bytes:
            lines.append(TOGETHER + format_bytes(self._live.together_bytes))
        if refusal is not None:
            lines = [*lines, REFUSED + refusal] if self._live.has_run else [NOTHING_RAN + refusal]
        return "\n".join(lines) or NO_GRAPH

    def report(self, path: str | Path) -> None:
        """Write a report about the graphs.

        Parameters
        ----------
        path : str or Path
            ``*.json``: the records of all graphs; ``*.html``: a page about the schedule of the
            graph with the highest peak, which needs ``poetmodel[report]``.

        Raises
        ------
        InputError
            If no graph was compiled yet, or the file cannot be written.
        MissingExtraError
            If a page is requested, and a library that draws it is not installed.
        """
        if not self._planned:
            raise InputError(f"{path}: nothing to report; run the compiled function once before")
        kind = Path(path).suffix
        if kind == ".json":
            records = [record.to_dict() for record in self.plans]
            values = {"format": FORMAT, "version": VERSION, "plans": records}
            write_text(path, json.dumps(values, allow_nan=False, ensure_ascii=False) + "\n")
        elif kind == ".html":
            largest = max(self._planned, key=lambda planned: planned.record.predicted_peak_bytes)
            write_page(path, largest)
        else:
            raise InputError(f"{path}: expected a file *.html, a page, or *.json, the records")

    def rewrite(
        self, joint: JointGraph, *, reserved_bytes: int = 0
    ) -> tuple[fx.Graph, list[fx.Node]]:
        """Plan a graph; return it in the order of its plan, and the nodes its forward pass saves.

        `reserved_bytes` of the budget are for memory that the plan does not count. Records the plan
        and logs it, with warnings.

        Raises
        ------
        BudgetError
            If the budget is too small; the message has the smallest known sufficient budget.
        """
        with self.first_call() as call:
            name = f"graph {len(self._planned)}{call.title}"
            planned = call.planned
            if planned is None:
                profiles, agreed_call = self._agree_profiles(joint, call)
                planned = self._plan(joint, profiles, name, agreed_call, reserved_bytes)
        self._planned.append(planned)
        _LOG.info("%s", planned.record)
        record = planned.record
        if record.eager_bytes is not None and record.ram_budget_bytes > record.eager_bytes:
            _LOG.warning(
                _CHECKPOINTED,
                name,
                self._settings.ram,
                format_bytes(record.keep_all_bytes),
                format_bytes(record.eager_bytes),
            )
        if record.is_loss_missing and not self._has_warned:
            self._has_warned = True
            remedy = _RETURN_IT if self._settings.outside is None else _FIRST_STEP
            if planned.turn is not None:
                remedy = _STATE_IT
            _LOG.warning("%s: %s; %s", name, LOSS_OUTSIDE, remedy)
        rewriter = JointRewriter(joint, -1 if self._file is None else self._file.number)
        new_graph = rewriter.rewrite(planned.plan.program, planned.turn)
        return new_graph, list(rewriter.saved)

    def _agree_profiles(
        self, joint: JointGraph, call: FirstCall
    ) -> tuple[Sequence[OpProfile], FirstCall]:
        """Return the profiles of a graph, and the call with rates and sizes of its wrappers.

        Measurements of processes differ, by their processors or by chance. Each process uses the
        maximum of all processes, so that they have one plan, which is valid in all.
        """
        if self._is_predicted:
            return [operation.profile for operation in joint.operations], call
        call.show_phase("measuring operations")
        key = joint.training_graph().sha256  # as PyTorch predicts it
        profiles = self._profiles.get(joint)
        rates = None if self._settings.device else machine_rates(self._settings.cache)
        measurements = call.gather(key, (profiles, rates, call.wrapped_bytes))
        all_profiles, all_rates, wrapped_bytes = zip(*measurements, strict=True)
        profiles = [
            own_profile.with_maxima(other_profiles)
            for own_profile, *other_profiles in zip(profiles, *all_profiles, strict=True)
        ]
        if rates is not None:
            rates = tuple(map(min, zip(*all_rates, strict=True)))
        return profiles, replace(call, rates=rates, wrapped_bytes=max(wrapped_bytes))

    def _plan(
        self,
        joint: JointGraph,
        profiles: Sequence[OpProfile],
        name: str,
        call: FirstCall,
        reserved_bytes: int,
    ) -> GraphPlan:
        """Return the plan of a graph: alone, or the one that leaves most RAM to other calls."""
        self._frontier = None
        options: dict[str, Any] = {
            "name": name,
            "call": call,
            "reserved_bytes": reserved_bytes,
            "is_predicted": self._is_predicted,
        }
        if not joint.is_inference and not self._is_predicted and not reserved_bytes:
            graph_options = options | {"call": replace(call, outside=Outside())}
            self._frontier = Frontier(
                GraphProblem.of(joint, profiles, self._settings, **graph_options)
            )
        if self._frontier is None or not call.is_several:
            return plan(joint, profiles, self._settings, **options)
        stated_bytes = self._settings.stated_bytes
        if stated_bytes is not None:
            self._frontier.check_budget(stated_bytes)
        tight_plan = self._frontier.tight
        budget_bytes = stated_bytes or tight_plan.record.predicted_peak_bytes
        record = replace(
            tight_plan.record,
            ram_budget_bytes=budget_bytes,
            outside_bytes=call.outside.peak_bytes or None,
            is_loss_missing=tight_plan.record.is_loss_missing and not any(call.outside),
        )
        return replace(tight_plan, record=record)
