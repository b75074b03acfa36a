"""Minimum budgets of the back end, with returned gradients and with gradients that it adds."""

from __future__ import annotations

import copy
import logging
import warnings
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any, Final

from harness import DONE, RecordedRun, Study, make_record
from poetmodel.sweeps.measurement import FAILED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from poetmodel.sweeps.measurement import Record

KIND: Final = "floors"
"""Kind of the records."""
NETWORKS: Final = ("mlp", "gpt", "vit", "resnet18", "res2net50")
"""Networks of `pytorch.networks`."""
BATCHES: Final = {"mlp": 16, "gpt": 2, "vit": 4, "resnet18": 4, "res2net50": 2}
"""Samples of each network."""
RATIOS: Final = (1.0, 1.01, 1.03, 1.1, 1.3, 2.0)
"""Budgets relative to the lowest peak found, tried in order until one is feasible."""
WALL_RATIO: Final = 30.0
"""Wall time limit of the search, as a multiple of its CPU time."""
SEED: Final = 0
"""Seed of weights, inputs and dropout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FloorRun(RecordedRun):
    """One network, with a back end that returns gradients or adds them to ``.grad``."""

    network: str
    """One of `NETWORKS`."""
    is_added: bool
    """Whether the back end adds gradients."""
    limit_s: float = 5.0
    """CPU time limit of the search for the lowest peak [s]."""

    @property
    def name(self) -> str:
        """Name of the run in records."""
        return f"{self.network} | {'added' if self.is_added else 'returned'}"


def floor_runs(networks: tuple[str, ...] = NETWORKS) -> Iterator[FloorRun]:
    """Yield a run with returned and one with added gradients for each network."""
    for network in networks:
        for is_added in (False, True):
            yield FloorRun(network=network, is_added=is_added)


def measure(fields: dict[str, Any], _: Any) -> Record:
    """Search for the smallest budget in which a network trains; return the record.

    Turns warnings off and sets the number of PyTorch's threads to 1.
    """
    import torch

    warnings.simplefilter("ignore")  # PyTorch warns about its own code
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    run = FloorRun(**fields)
    return make_record(KIND, run.name, cell=fields, torch=torch.__version__, **_search_floor(run))


def _search_floor(run: FloorRun) -> dict[str, Any]:
    import torch
    from torch._dynamo.exc import BackendCompilerFailed

    from poetmodel.errors import BudgetError
    from poetmodel.torch.graph.tensors import heap_peak_bytes

    model, loss = _make_network(run.network)
    expected = copy.deepcopy(model)
    _execute_passes(expected, loss)
    backend, step = _compile_passes(run, copy.deepcopy(model), loss, "100%")
    step()
    keep_all_bytes, lowest_bytes, bound_bytes = _find_lowest_peak(backend, run.limit_s)
    facts: dict[str, Any] = {
        "gradient_bytes": sum(p.nbytes for p in model.parameters() if p.requires_grad),
        "keep_all_bytes": keep_all_bytes,
        "found_bytes": lowest_bytes,
        "bound_bytes": bound_bytes,
    }
    for ratio in RATIOS:
        trained = copy.deepcopy(model)
        budget_bytes = min(ceil(ratio * lowest_bytes), keep_all_bytes)
        backend, step = _compile_passes(run, trained, loss, budget_bytes)
        try:
            step()
        except BackendCompilerFailed as error:
            if not isinstance(error.inner_exception, BudgetError):
                raise
            continue
        pairs = zip(trained.parameters(), expected.parameters(), strict=True)
        is_equal = all(
            torch.equal(parameter.grad, expected_parameter.grad)
            for parameter, expected_parameter in pairs
        )
        peak_bytes = heap_peak_bytes(step)  # ``.grad`` exists and is added to
        status = DONE if is_equal and peak_bytes <= budget_bytes else FAILED
        reason = "" if status == DONE else f"equal: {is_equal}, peak: {peak_bytes:,} B"
        return {
            **facts,
            "status": status,
            "reason": reason,
            "budget_bytes": budget_bytes,
            "peak_bytes": peak_bytes,
            "overhead": backend.plans[0].overhead,
            "equal": is_equal,
        }
    return {**facts, "status": FAILED, "reason": "no budget that was tried works"}


def _make_network(name: str) -> tuple[Any, Callable[[Any], Any]]:
    """Return a network, and a function that returns its loss for one batch."""
    import torch

    from pytorch import networks

    torch.manual_seed(SEED)
    model, loss_fn, (x, y) = getattr(networks, name)(BATCHES[name])
    return model, lambda net: loss_fn(net(x), y)


def _execute_passes(model: Any, loss: Callable[[Any], Any]) -> None:
    import torch

    torch.manual_seed(SEED)
    loss(model).backward()


def _compile_passes(
    run: FloorRun, model: Any, loss: Callable[[Any], Any], ram: str | int
) -> tuple[Any, Callable[[], None]]:
    """Return a back end, and a function that executes both passes of a network by it.

    Compilation is at the first call.
    """
    import torch

    import poetmodel.torch as pmt

    torch.compiler.reset()
    backend = pmt.backend(
        ram, cache=False, device="rpi4b", add_gradients=run.is_added, time_limit=run.limit_s
    )
    compiled = torch.compile(loss, backend=backend, fullgraph=True, dynamic=False)
    return backend, partial(_execute_passes, model, compiled)


def _find_lowest_peak(backend: Any, limit_s: float) -> tuple[int, int, int]:
    """Minimize the peak RAM; return the keep-all peak, the lowest peak found, and its bound [B]."""
    from poetmodel.clock import processor_clock
    from poetmodel.solver import solve

    (graph_plan,) = backend._graph_plans  # noqa: SLF001 - public records lack the problem
    keep_all_bytes = graph_plan.record.keep_all_bytes
    reserved_bytes = graph_plan.record.predicted_peak_bytes - graph_plan.check.peak_ram_bytes
    problem = replace(graph_plan.result.problem, ram="100%", minimize="ram")
    with processor_clock(WALL_RATIO * limit_s):
        result = solve(problem, time_limit=limit_s, gap=0.0, threads=1)
    lowest_bytes = (result.peak_ram_bytes or problem.ram_budget_bytes) + reserved_bytes
    return keep_all_bytes, lowest_bytes, ceil(result.bound or 0.0) + reserved_bytes


STUDY: Final = Study(
    name=KIND,
    kind=KIND,
    runs=floor_runs,
    smoke_runs=lambda: [FloorRun(network="mlp", is_added=True, limit_s=1.0)],
    measure=measure,
    preloaded=("torch", "poetmodel.torch", "highspy", "pytorch.networks"),
    grace_s=1200.0,
)
