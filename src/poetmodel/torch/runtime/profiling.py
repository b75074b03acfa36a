"""Profiling: measure the costs of a traced step on this host, in time and energy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel.device import Costs, Device
from poetmodel.errors import InputError, quote
from poetmodel.torch.capturing.joint_graph import InputKind, Joint
from poetmodel.torch.capturing.process_state import temporary_setting
from poetmodel.torch.capturing.replay import execute_kernel, replay_distinct
from poetmodel.torch.state.paging import Paging, measure_paging
from poetmodel.torch.step.trace import Trace
from poetmodel.torch.step.updates import ParameterUpdate, copy_tensors
from poetmodel.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch import fx

    from poetmodel.torch.graph.step_graph import StepGraph
    from poetmodel.torch.state.paging import TransferTime


CACHED_NOTE: Final = "all this was measured by an earlier compile, and read from the cache"
"""Note on costs from the cache."""
MEASURING_S: Final = 2.0
"""Time after which a compilation or a certificate times no further step [s]."""
MIN_STEPS: Final = 2
"""Number of steps that are timed even after the time limit: other programs may slow one step."""
MAX_SPREAD_RATIO: Final = 0.1
"""Spread of the times of steps, relative to the shortest, above which a note is added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """Power during computation and paging [W]."""

    compute_w: float
    page_in_w: float
    page_out_w: float
    source: str
    """Source of the numbers, for display."""

    @classmethod
    def from_watts(cls, power_w: float) -> Power:
        """Return a power of `power_w` for computation, page-ins and page-outs; not validated."""
        return cls(
            compute_w=power_w,
            page_in_w=power_w,
            page_out_w=power_w,
            source=f"at {power_w:g} W, as stated",
        )

    @classmethod
    def from_device(cls, device: Device) -> Power:
        """Return the power of a host's device: paging as its storage, or else as computation."""
        compute, storage = device.compute, device.storage
        compute_w = compute.power_w
        if compute_w is None:  # then a device states FLOP per joule
            compute_w = compute.flops_per_s / (compute.flops_per_j or compute.flops_per_s)
        return cls(
            compute_w=compute_w,
            page_in_w=compute_w if storage is None else storage.page_in.power_w,
            page_out_w=compute_w if storage is None else storage.page_out.power_w,
            source=f"the power of device {device.short_name}",
        )


NOMINAL_POWER: Final = Power(
    compute_w=1.0,
    page_in_w=1.0,
    page_out_w=1.0,
    source="at a nominal 1 W, so that they are proportional to times",
)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The measured costs of a traced step, with the conditions of the measurement."""

    costs: Costs
    """Times and energies of every node and tensor of the trace's graph."""
    paging: Paging | None
    """The measurement of page costs; None if no tensor may be paged."""
    steps_s: tuple[float, ...]
    """Total time of the operations in each timed step [s]."""
    threads: int
    power: Power = NOMINAL_POWER
    """Power that times are multiplied by."""
    origin: str = ""
    """Note on costs that were not measured now; otherwise empty."""

    @property
    def repeats(self) -> int:
        """Number of timed steps."""
        return len(self.steps_s)

    @property
    def spread_ratio(self) -> float:
        """Longest over shortest time of the timed steps, minus 1; 0 if the shortest time is 0."""
        min_s = min(self.steps_s)
        return max(self.steps_s) / min_s - 1 if min_s > 0 else 0.0

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for display: compute times, page times if measured, energies, and `origin` if any.

        A spread of the times of steps above `MAX_SPREAD_RATIO` adds a note after the first.
        """
        notes = [
            f"compute times: of each operation the minimum of {self.repeats} steps, "
            f"{self.threads} thread(s); the steps took {format_seconds(min(self.steps_s))} to "
            f"{format_seconds(max(self.steps_s))}, a spread of {self.spread_ratio:.0%}"
        ]
        if self.spread_ratio > MAX_SPREAD_RATIO:
            notes.append(
                "such a large spread usually means that other programs ran: measure again when the "
                "machine is idle"
            )
        if self.paging is not None:
            medium = (
                "the file cache was empty for every read"
                if self.paging.cold
                else "the file cache may not have been emptied: page-ins may come from RAM"
            )
            notes.append(f"page times: measured in {self.paging.folder}; {medium}")
        notes.append(f"energies: {self.power.source}")
        return (*notes, self.origin) if self.origin else tuple(notes)


def measure(
    trace: Trace,
    *,
    folder: str | Path | None = ".",
    repeats: int = 5,
    max_s: float = math.inf,
    threads: int | None = None,
    power: Power | None = None,
) -> Profile:
    """Measure the costs of a traced step on this host.

    Parameters
    ----------
    trace : Trace
        The step, which is executed on the inputs that it was traced with.
    folder : str or Path, optional
        Folder for pages; None if no tensor may be paged.
    repeats : int
        Maximum number of timed steps: of each operation, the shortest time counts. Also the number
        of transfers of each page size, of which the median counts. In a step, expensive operations
        with equal shapes are timed once.
    max_s : float
        Time after which no third or later step is started [s].
    threads : int, optional
        Number of threads; by default PyTorch's setting (`torch.get_num_threads`).
    power : Power, optional
        Power that times are multiplied by; by default a nominal 1 W.

    Returns
    -------
    Profile
        Costs for every node and tensor of ``trace.graph``.

    Raises
    ------
    InputError
        If an argument is invalid, if pages cannot be timed in the folder, or if parameters of the
        step are not on the CPU.
    """
    _check_arguments(trace, repeats, threads)
    threads = threads or torch.get_num_threads()
    paging = None if folder is None else measure_paging(folder, repeats=repeats)
    times_s, steps_s = measure_operation_times(
        trace.joint, trace.step_graph, repeats=repeats, max_s=max_s, threads=threads
    )
    return build_profile(
        trace, times_s=times_s, paging=paging, steps_s=steps_s, threads=threads, power=power
    )


def build_profile(
    trace: Trace,
    *,
    times_s: Sequence[float],
    paging: Paging | None,
    steps_s: Sequence[float],
    threads: int,
    origin: str = "",
    power: Power | None = None,
) -> Profile:
    """Return a profile from measured times; energies are times multiplied by `power`."""
    power = power or NOMINAL_POWER
    costs = Costs.from_arrays(
        trace.graph,
        compute_time_s=times_s,
        compute_energy_j=[time_s * power.compute_w for time_s in times_s],
        page_in=None if paging is None else _page_costs(trace, paging.page_in, power.page_in_w),
        page_out=None if paging is None else _page_costs(trace, paging.page_out, power.page_out_w),
    )
    return Profile(
        costs=costs,
        paging=paging,
        steps_s=tuple(steps_s),
        threads=threads,
        origin=origin,
        power=power,
    )


def _page_costs(trace: Trace, transfer: TransferTime, power_w: float) -> list[tuple[float, float]]:
    """Return (time [s], energy [J]) of the transfer of each tensor in one direction."""
    times_s = map(transfer.time_s, trace.graph.tensor_bytes)
    return [(time_s, time_s * power_w) for time_s in times_s]


def _check_arguments(trace: object, repeats: object, threads: object) -> None:
    """Refuse arguments of other types and parameters that are not on the CPU."""
    if not isinstance(trace, Trace):
        raise InputError(f"expected the result of `trace`, got {quote(trace)}")
    for name, value in (("repeats", repeats), ("threads", 1 if threads is None else threads)):
        if type(value) is not int or value < 1:
            raise InputError(f"{name}: expected a whole number from 1, got {quote(value)}")
    joint = trace.joint
    device_types = {
        joint.value(argument).device.type for argument in joint.arguments_of(InputKind.PARAMETER)
    }
    if device_types != {"cpu"}:
        raise InputError(
            f"{joint.name}: only steps on the cpu can be measured, but its parameters are on "
            f"{' and '.join(sorted(device_types))}; estimate its costs for a device instead"
        )


# -- times of operations ----------------------------------------------------------------------


def measure_operation_times(
    joint: Joint,
    step_graph: StepGraph,
    *,
    repeats: int = 5,
    max_s: float = math.inf,
    threads: int = 1,
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return (time of each operation with the views of its inputs, time of each timed step) [s].

    Whole steps are repeated, because a repeated operation would find its inputs in the CPU cache.
    The minimum counts, because other load only adds time; CPU time with one thread. Of expensive
    operations with equal shapes the first is timed. State does not change.
    """
    shortest_s: dict[fx.Node, float] = {}
    steps_s: list[float] = []
    clock = thread_time if threads == 1 else perf_counter
    times_s: dict[fx.Node, float] = {}

    def execute(node: fx.Node, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Execute a node, an update on copies, and store its time."""
        call_kernel = partial(execute_kernel, node, arguments, keywords)
        if isinstance(node.target, ParameterUpdate):
            # A program overwrites state and gradient. Here other operations read them: use copies,
            # which are not timed.
            state, gradients, *operands = arguments
            copied_arguments = (copy_tensors(state), copy_tensors(gradients), *operands)
            call_kernel = partial(
                node.target.overwrite_state, *copied_arguments, owns_gradient=True
            )
        start_s = clock()
        value = call_kernel()
        times_s[node] = clock() - start_s
        return value

    start_s = perf_counter()
    with limit_threads(threads):
        while len(steps_s) < repeats and (
            len(steps_s) < MIN_STEPS or perf_counter() - start_s < max_s
        ):
            times_s.clear()
            executed_nodes = replay_distinct(joint, execute)
            times_s.update({node: times_s[executed] for node, executed in executed_nodes.items()})
            steps_s.append(sum(_operation_times(step_graph, times_s)))
            for node, time_s in times_s.items():
                shortest_s[node] = min(time_s, shortest_s.get(node, time_s))
    return tuple(_operation_times(step_graph, shortest_s)), tuple(steps_s)


def _operation_times(step_graph: StepGraph, times_s: Mapping[fx.Node, float]) -> Iterator[float]:
    """Yield the time of each operation with the views of its inputs; 0 for sources [s]."""
    for operation in step_graph.operations:
        views_s = (times_s[view] for view in operation.reads.views)
        yield 0.0 if operation.is_source else times_s[operation.node] + sum(views_s)


def limit_threads(threads: int) -> AbstractContextManager[None]:
    """Context manager that sets the number of PyTorch's threads, and restores it at the end."""
    return temporary_setting(torch.set_num_threads, threads, torch.get_num_threads())
