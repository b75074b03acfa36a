"""`backend`: a RAM budget for ``torch.compile``."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torch._dynamo.backends.common import aot_autograd
from torch._functorch import partitioners
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module

from poetmodel.device import Device
from poetmodel.errors import InputError, shown
from poetmodel.files import write_text
from poetmodel.torch.cache import Cache
from poetmodel.torch.capturing.surroundings import native_operators
from poetmodel.torch.dynamo.costs import Forms
from poetmodel.torch.dynamo.emission import Emitter
from poetmodel.torch.dynamo.operations import Operations, split_dropout
from poetmodel.torch.dynamo.pages import SlotFile
from poetmodel.torch.dynamo.planning import MEASURED, Planned, PlanRecord, Wanted, plan, write_page
from poetmodel.torch.dynamo.running import interpreted
from poetmodel.torch.errors import CaptureError
from poetmodel.torch.runtime.profiling import measure_paging
from poetmodel.torch.state.pages import make_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import fx

    from poetmodel.solver.request import SolveProgress

FORMAT: Final = "poetmodel-backend"
VERSION: Final = 1
KERNELS: Final = ("eager",)
"""Whose kernels a graph can run."""

_LOG: Final = logging.getLogger(__name__)


def backend(
    ram: str | int,
    *,
    kernels: str = "eager",
    storage: str | Path | None = None,
    device: str | Device | None = None,
    costs: str | None = None,
    time_limit: float = 20.0,
    gap: float = 0.01,
    on_progress: Callable[[SolveProgress], bool | None] | None = None,
    cache: str | Path | bool = True,
) -> Backend:
    """Return a back end for ``torch.compile`` that keeps a RAM budget.

    Parameters
    ----------
    ram : str or int
        What the compiled function may allocate at once: activations, gradients that it hands over,
        results, workspaces. Bytes, ``8GiB``, or a percentage of the peak of the same function with
        everything kept; without gradients nothing is, and a percentage stands for all of its peak.
        Parameters, inputs and the optimizer's state are not part of it.
    kernels : str
        ``eager``: those that PyTorch runs without ``torch.compile``, which give the same bits.
    storage : str or Path, optional
        A folder for pages; without it nothing is paged.
    device : str or Device, optional
        Whose figures estimate times; by default this machine's, measured once.
    costs : str, optional
        ``measured``: time the operations of the graph in place of estimates.
    time_limit : float
        Longest time to solve each graph [s].
    gap : float
        Gap between schedule and bound at which a solve ends, as a fraction.
    on_progress : callable, optional
        Called with the progress of a solve; it ends where that returns False.
    cache : str, Path or bool
        Folder of what was measured and solved before; True for the user's, False for none.

    Returns
    -------
    Backend
        For ``torch.compile(function, backend=..., fullgraph=True, dynamic=False)``, or
        ``model.compile`` likewise. Its ``plans`` tell of each graph.

    Raises
    ------
    InputError
        If an argument is none of these.
    """
    faults = []
    if kernels not in KERNELS:
        faults.append(f"kernels: expected {' or '.join(KERNELS)}, got {shown(kernels)}")
    if costs not in (None, MEASURED):
        faults.append(f"costs: expected {MEASURED} or nothing, got {shown(costs)}")
    if costs is not None and device is not None:
        faults.append("give a device or costs, not both")
    if faults:
        raise InputError(faults)
    if storage is not None:
        make_folder(storage)
    return Backend(
        Wanted(
            ram=ram,
            device=Device.load(device) if isinstance(device, str) else device,
            costs=costs,
            paging=None if storage is None else measure_paging(storage),
            time_limit=time_limit,
            gap=gap,
            on_progress=on_progress,
            cache=Cache.of(cache),
        ),
        storage,
    )


class Backend:
    """Plans each graph that ``torch.compile`` captures; made by `poetmodel.torch.backend`."""

    __name__ = "poetmodel"

    def __init__(self, wanted: Wanted, storage: str | Path | None) -> None:
        self._planned: list[Planned] = []
        self._wanted = wanted
        self._forms = Forms(wanted.cache, timed=wanted.costs == MEASURED)
        self._file = None if storage is None else SlotFile(storage)
        self._compile = aot_autograd(
            fw_compiler=interpreted,
            bw_compiler=interpreted,
            inference_compiler=self._inference,
            partition_fn=self._partition,
        )

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        """Compile a graph, as ``torch.compile`` asks for it."""
        _require_one_graph()
        with native_operators(), _use_lazy_graph_module(should_use=True):  # no code is run of it
            return self._compile(module, inputs, **options)

    @property
    def plans(self) -> list[PlanRecord]:
        """One record for each graph, in the order of capture."""
        return [planned.record for planned in self._planned]

    def summary(self) -> str:
        """Return a line about each graph: peak, budget, what is recomputed and paged, overhead."""
        return "\n".join(map(str, self.plans))

    def report(self, path: str | Path) -> None:
        """Write what is known of the graphs.

        Parameters
        ----------
        path : str or Path
            ``*.json``: the records of all graphs; ``*.html``: a page about the schedule of the
            graph with the highest peak, which needs ``poetmodel[report]``.

        Raises
        ------
        InputError
            If nothing was compiled yet, or the file cannot be written.
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
            largest = max(self._planned, key=lambda one: one.record.predicted_peak_bytes)
            write_page(path, largest)
        else:
            raise InputError(f"{path}: expected a file *.html, a page, or *.json, the records")

    def _partition(
        self,
        module: fx.GraphModule,
        _: Sequence[Any],
        *,
        num_fwd_outputs: int,
        **_others: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        graph, saved = self._rewritten(module.graph, num_fwd_outputs)
        joint = _make_graph_module(module, graph)
        forward, backward = partitioners._extract_fwd_bwd_modules(  # noqa: SLF001 - as PyTorch's
            joint, saved, [], num_fwd_outputs=num_fwd_outputs
        )
        return forward, backward

    def _inference(self, module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        graph, _saved = self._rewritten(module.graph, None)
        return interpreted(_make_graph_module(module, graph))

    def _rewritten(
        self, graph: fx.Graph, forward_outputs: int | None
    ) -> tuple[fx.Graph, list[fx.Node]]:
        graph.eliminate_dead_code()
        split_dropout(graph)
        operations = Operations(graph, forward_outputs)
        name = f"graph {len(self._planned)}"
        planned = plan(operations, self._forms.of(operations), self._wanted, name=name)
        self._planned.append(planned)
        _LOG.info("%s", planned.record)
        emitter = Emitter(operations, -1 if self._file is None else self._file.number)
        new = emitter.emit(planned.steps)
        return new, list(emitter.saved)


def _require_one_graph() -> None:
    """Raise unless ``torch.compile`` refuses graph breaks."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    translator = getattr(InstructionTranslator, "current_tx", lambda: None)()
    if translator is not None and not translator.one_graph:
        raise CaptureError(
            "the saved tensors of several graphs add up, and what is between graphs has no budget: "
            "pass fullgraph=True to torch.compile, which names the line that breaks the graph"
        )
