"""Profiling: what a traced step costs on this host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from poetmodel.device import Costs
from poetmodel.errors import InputError, shown
from poetmodel.torch.energy import NOMINAL, Power, measured_power, power_of
from poetmodel.torch.paging import Paging, measure_paging
from poetmodel.torch.replay import replay
from poetmodel.torch.roles import Source
from poetmodel.torch.timing import limited_threads, unit_times_s

if TYPE_CHECKING:
    from pathlib import Path

    from poetmodel.device import Device
    from poetmodel.torch.tracing import Trace


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The measured costs of a traced step, and how they were measured."""

    costs: Costs
    """Times and energies of every node and every tensor of the trace's graph."""
    paging: Paging
    """The fit that page costs come from."""
    power: Power
    """What energies come from."""
    repeats: int
    """How often everything was measured."""
    threads: int
    """Threads that computed."""

    @property
    def notes(self) -> tuple[str, ...]:
        """How the figures came about, one sentence each."""
        medium = (
            "the file cache was empty for every read"
            if self.paging.cold
            else "the file cache could not be emptied: page-ins may be those of RAM"
        )
        return (
            f"compute times: least of {self.repeats} steps, {self.threads} thread(s)",
            f"page times: measured in {self.paging.folder}; {medium}",
            f"energies: {self.power.source}",
        )


def measure(
    trace: Trace,
    *,
    folder: str | Path = ".",
    repeats: int = 5,
    threads: int | None = None,
    power_from: Device | None = None,
) -> Profile:
    """Measure what a traced step costs on this host.

    Parameters
    ----------
    trace : Trace
        The step; runs on the inputs that it was traced with.
    folder : str or Path
        Where pages are to lie.
    repeats : int
        Steps that are timed, of which the least counts, and times that each page is moved, of
        which the median does.
    threads : int, optional
        Threads that compute; by default as many as PyTorch is set to (`torch.get_num_threads`).
    power_from : Device, optional
        Its power figures make energies of times; without it RAPL counters where they can be
        read, else a nominal 1 W.

    Returns
    -------
    Profile
        Costs for every node and tensor of ``trace.graph``.

    Raises
    ------
    InputError
        If pages cannot be timed in the folder, or the step does not run on the processor.
    """
    import torch

    _check_asked(trace, repeats, threads)
    _check_device(trace)
    threads = threads or torch.get_num_threads()
    paging = measure_paging(folder, repeats=repeats)
    times_s = unit_times_s(trace.joint, trace.parts, repeats=repeats, threads=threads)
    power = power_of(power_from) if power_from is not None else _host_power(trace, threads)
    into, out = paging.page_in, paging.page_out
    sizes = trace.graph.tensor_bytes
    costs = Costs.from_arrays(
        trace.graph,
        compute_time_s=times_s,
        compute_energy_j=[time_s * power.compute_w for time_s in times_s],
        page_in=[(into.time_s(b), into.time_s(b) * power.page_in_w) for b in sizes],
        page_out=[(out.time_s(b), out.time_s(b) * power.page_out_w) for b in sizes],
    )
    return Profile(costs=costs, paging=paging, power=power, repeats=repeats, threads=threads)


def _check_asked(trace: object, repeats: object, threads: object) -> None:
    from poetmodel.torch.tracing import Trace

    if not isinstance(trace, Trace):
        msg = f"expected what `trace` returns, got {shown(trace)}"
        raise InputError(msg)
    for name, value in (("repeats", repeats), ("threads", 1 if threads is None else threads)):
        if type(value) is not int or value < 1:
            msg = f"{name}: expected a whole number from 1, got {shown(value)}"
            raise InputError(msg)


def _check_device(trace: Trace) -> None:
    joint = trace.joint
    kinds = {joint.value(argument).device.type for argument in joint.of(Source.PARAMETER)}
    if kinds != {"cpu"}:
        msg = (
            f"{joint.name}: only steps on the cpu can be measured, and its parameters are on "
            f"{' and '.join(sorted(kinds))}; estimate its costs for a device instead"
        )
        raise InputError(msg)


def _host_power(trace: Trace, threads: int) -> Power:
    def work() -> None:
        with limited_threads(threads):
            replay(trace.joint)

    return measured_power(work) or NOMINAL
