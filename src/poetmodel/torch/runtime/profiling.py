"""Profiling: what a traced step costs on this host, in time and in energy."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from poetmodel.device import Costs, Device
from poetmodel.errors import InputError, shown
from poetmodel.torch.capturing.joint_graph import InputKind, Joint
from poetmodel.torch.capturing.replay import call, replay_sampled, temporary_setting
from poetmodel.torch.state.pages import checksum, read_page, write_page
from poetmodel.torch.step.trace import Trace
from poetmodel.torch.step.updates import ParameterUpdate, copy_tensors
from poetmodel.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch import fx

    from poetmodel.torch.step.captured import CapturedGraph


MEASURED_BEFORE: Final = "all this was measured by an earlier compile, and read from the cache"
MEASURING_S: Final = 2.0
"""Time after which no further step is timed [s]."""
LEAST_STEPS: Final = 2
"""Steps that are timed whatever they take: a single one may have met a busy machine."""
NOTABLE: Final = 0.1
"""Times that differ by more than this share of the smaller one are explained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """Power while computing and while paging [W]."""

    compute_w: float
    page_in_w: float
    page_out_w: float
    source: str
    """Where the figures come from, for people."""

    @classmethod
    def of(cls, power_w: float) -> Power:
        """Return the same power for computing and paging."""
        return cls(
            compute_w=power_w,
            page_in_w=power_w,
            page_out_w=power_w,
            source=f"at {power_w:g} W, as stated",
        )

    @classmethod
    def of_device(cls, device: Device) -> Power:
        """Return the power figures of a device that describes this host.

        Where it states FLOP per joule only, its power is its FLOP rate over that. Without storage,
        paging takes the power of computing.
        """
        compute, storage = device.compute, device.storage
        compute_w = compute.power_w
        if compute_w is None:  # a device states one of both
            compute_w = compute.flops_per_s / (compute.flops_per_j or compute.flops_per_s)
        return cls(
            compute_w=compute_w,
            page_in_w=compute_w if storage is None else storage.page_in.power_w,
            page_out_w=compute_w if storage is None else storage.page_out.power_w,
            source=f"the power figures of device {device.short_name}",
        )


NOMINAL: Final = Power(
    compute_w=1.0,
    page_in_w=1.0,
    page_out_w=1.0,
    source="at a nominal 1 W, so that they are proportional to times",
)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The measured costs of a traced step, and how they were measured."""

    costs: Costs
    """Times and energies of every node and every tensor of the trace's graph."""
    paging: Paging | None
    """The fit that page costs come from; None where no tensor is to be paged."""
    steps_s: tuple[float, ...]
    """Time of the operations together in each timed step [s]; one of equal operations counts
    for all."""
    threads: int
    power: Power = NOMINAL
    """The power that energies are times of."""
    origin: str = ""
    """Where it comes from, if it was not measured now."""

    @property
    def repeats(self) -> int:
        """How many steps were timed."""
        return len(self.steps_s)

    @property
    def spread_ratio(self) -> float:
        """How much longer the slowest of the timed steps took than the fastest, as a fraction."""
        least_s = min(self.steps_s)
        return max(self.steps_s) / least_s - 1 if least_s > 0 else 0.0

    @property
    def notes(self) -> tuple[str, ...]:
        """How the figures came about, one sentence each."""
        notes = [
            f"compute times: of each operation the least of {self.repeats} steps, "
            f"{self.threads} thread(s); the steps took {format_seconds(min(self.steps_s))} to "
            f"{format_seconds(max(self.steps_s))}, a spread of {self.spread_ratio:.0%}"
        ]
        if self.spread_ratio > NOTABLE:
            notes.append(
                "so large a spread mostly means that other programs ran: measure again when the "
                "machine is idle"
            )
        if self.paging is not None:
            medium = (
                "the file cache was empty for every read"
                if self.paging.cold
                else "the file cache could not be emptied: page-ins may be those of RAM"
            )
            notes.append(f"page times: measured in {self.paging.folder}; {medium}")
        notes.append(f"energies: {self.power.source}")
        return (*notes, self.origin) if self.origin else tuple(notes)


def measure(
    trace: Trace,
    *,
    folder: str | Path | None = ".",
    repeats: int = 5,
    most_s: float = math.inf,
    threads: int | None = None,
    power: Power | None = None,
) -> Profile:
    """Measure what a traced step costs on this host.

    Parameters
    ----------
    trace : Trace
        The step; runs on the inputs that it was traced with.
    folder : str or Path, optional
        Where pages are to lie; None where no tensor is to be paged.
    repeats : int
        Steps that are timed, of which the least counts, and times that each page is moved, of
        which the median does. In each, expensive operations of one form are timed once.
    most_s : float
        Time after which no further step is begun, of at least two [s].
    threads : int, optional
        Threads that compute; by default as many as PyTorch is set to (`torch.get_num_threads`).
    power : Power, optional
        The power that energies are times of; by default a nominal 1 W.

    Returns
    -------
    Profile
        Costs for every node and tensor of ``trace.graph``.

    Raises
    ------
    InputError
        If pages cannot be timed in the folder, or the step does not run on the processor.
    """
    _check(trace, repeats, threads)
    threads = threads or torch.get_num_threads()
    paging = None if folder is None else measure_paging(folder, repeats=repeats)
    times_s, steps_s = unit_times_s(
        trace.joint, trace.parts, repeats=repeats, most_s=most_s, threads=threads
    )
    return profile_of(
        trace, times_s=times_s, paging=paging, steps_s=steps_s, threads=threads, power=power
    )


def profile_of(
    trace: Trace,
    *,
    times_s: Sequence[float],
    paging: Paging | None,
    steps_s: Sequence[float],
    threads: int,
    origin: str = "",
    power: Power | None = None,
) -> Profile:
    """Return the profile that follows from what was measured."""
    power = power or NOMINAL
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


def _page_costs(trace: Trace, way: TransferTime, power_w: float) -> list[tuple[float, float]]:
    """Return time and energy of a page of each tensor in one direction [s, J]."""
    times_s = map(way.time_s, trace.graph.tensor_bytes)
    return [(time_s, time_s * power_w) for time_s in times_s]


def _check(trace: object, repeats: object, threads: object) -> None:
    if not isinstance(trace, Trace):
        raise InputError(f"expected what `trace` returns, got {shown(trace)}")
    for name, value in (("repeats", repeats), ("threads", 1 if threads is None else threads)):
        if type(value) is not int or value < 1:
            raise InputError(f"{name}: expected a whole number from 1, got {shown(value)}")
    joint = trace.joint
    kinds = {
        joint.value(argument).device.type for argument in joint.arguments_of(InputKind.PARAMETER)
    }
    if kinds != {"cpu"}:
        raise InputError(
            f"{joint.name}: only steps on the cpu can be measured, and its parameters are on "
            f"{' and '.join(sorted(kinds))}; estimate its costs for a device instead"
        )


# -- times of operations ----------------------------------------------------------------------


def unit_times_s(
    joint: Joint,
    parts: CapturedGraph,
    *,
    repeats: int = 5,
    most_s: float = math.inf,
    threads: int = 1,
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Measure the times of operations, with the views of their inputs, and of whole steps [s].

    Whole steps are repeated, not single operations: an operation that runs again and again on the
    same inputs finds them in the cache, which it does not in a training step. Of expensive
    operations of one form the first in a step is timed for all. The least of all steps is taken
    because whatever else the machine does only adds. With one thread its processor time is taken,
    which does not run while other programs have the core; with more, the time of the wall clock.
    """
    least: dict[fx.Node, float] = {}
    steps_s: list[float] = []
    clock = thread_time if threads == 1 else perf_counter
    now: dict[fx.Node, float] = {}

    def execute(node: fx.Node, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        work = partial(call, node, arguments, keywords)
        if isinstance(node.target, ParameterUpdate):
            # A program writes over state and gradient; here others read them.
            state, gradients, *others = arguments
            own = (copy_tensors(state), copy_tensors(gradients), *others)
            work = partial(node.target.replace, *own, owned=True)
        begin = clock()
        value = work()
        now[node] = clock() - begin
        return value

    begin = perf_counter()
    with limited_threads(threads):
        while len(steps_s) < repeats and (
            len(steps_s) < LEAST_STEPS or perf_counter() - begin < most_s
        ):
            now.clear()
            like = replay_sampled(joint, execute)
            now.update({node: now[first] for node, first in like.items()})
            steps_s.append(sum(_of_units(parts, now)))
            for node, took_s in now.items():
                least[node] = min(took_s, least.get(node, took_s))
    return tuple(_of_units(parts, least)), tuple(steps_s)


def _of_units(parts: CapturedGraph, times_s: Mapping[fx.Node, float]) -> Iterator[float]:
    """Yield the time of each operation with the views of its inputs [s]."""
    for operation in parts.operations:
        views_s = (times_s[view] for view in operation.reads.views)
        yield 0.0 if operation.is_source else times_s[operation.node] + sum(views_s)


def limited_threads(threads: int) -> AbstractContextManager[None]:
    """Let PyTorch compute with so many threads inside."""
    return temporary_setting(torch.set_num_threads, threads, torch.get_num_threads())


# -- times of pages ---------------------------------------------------------------------------

SIZES_BYTES: Final = tuple(4096 * 4**k for k in range(7))
"""Sizes of the pages that are timed: 4 KiB to 16 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferTime:
    """The time of one direction: latency plus bytes over rate."""

    latency_s: float
    bytes_per_s: float

    def time_s(self, size_bytes: int) -> float:
        """Return the time of a page [s]."""
        return self.latency_s + size_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Paging:
    """Paging costs of a folder."""

    page_in: TransferTime
    page_out: TransferTime
    cold: bool
    """Whether reads came from the medium; False where the cache could not be emptied."""
    folder: str


def measure_paging(
    folder: str | Path, *, repeats: int = 5, sizes_bytes: Sequence[int] = SIZES_BYTES
) -> Paging:
    """Measure page-out and page-in in a folder, for pages of two or more sizes.

    A page-out is ``pwrite`` and ``fdatasync``, so that it ends when the medium has the bytes, and
    the copy in the file cache is dropped after it (``POSIX_FADV_DONTNEED``); a page-in then reads
    from the medium. Both take the checksum of the page, as steps do. The median is taken, and not
    the least as for operations: what a medium takes varies by itself, and a step pays for all of
    it. Whether the cache was empty is tried with a read that may not wait (``RWF_NOWAIT``). Latency
    and rate are fitted to the relative deviations, so that small pages count as much as large ones.
    """
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".poetmodel-paging-") as file:
            return _measure(file.fileno(), str(folder), repeats, sorted(sizes_bytes))
    except OSError as error:
        needed = format_bytes(max(sizes_bytes))
        raise InputError(
            f"{folder}: pages cannot be timed here ({error.strerror or error}); give a folder "
            f"that exists, can be written and has {needed} free"
        ) from None


def _measure(descriptor: int, folder: str, repeats: int, sizes_bytes: Sequence[int]) -> Paging:
    written, read = [], []
    # Unmapped with its last view: after an error some are still held.
    memory = memoryview(mmap.mmap(-1, max(sizes_bytes)))
    memory[:] = os.urandom(4096) * (max(sizes_bytes) // 4096) + bytes(max(sizes_bytes) % 4096)
    os.pwrite(descriptor, memory, 0)
    os.fdatasync(descriptor)
    for size in sizes_bytes:
        page = memory[:size]
        outs, ins = [], []
        for _ in range(repeats):
            begin = perf_counter()
            checksum(page)
            write_page(descriptor, page, 0)
            outs.append(perf_counter() - begin)
            begin = perf_counter()
            if read_page(descriptor, page, 0) < size:
                raise OSError("the file is shorter than what was written to it")
            checksum(page)
            ins.append(perf_counter() - begin)
        written.append(median(outs))
        read.append(median(ins))
    write_page(descriptor, memory[: min(sizes_bytes)], 0)
    cold = _is_cold(descriptor)
    return Paging(
        page_in=fitted(sizes_bytes, read),
        page_out=fitted(sizes_bytes, written),
        cold=cold,
        folder=folder,
    )


def _is_cold(descriptor: int) -> bool:
    """Whether the first block of a file is not in the file cache."""
    try:
        return os.preadv(descriptor, [bytearray(4096)], 0, os.RWF_NOWAIT) == 0
    except BlockingIOError:
        return True
    except OSError:  # the file system does not know such reads: nothing is proven
        return False


def fitted(sizes_bytes: Sequence[int], times_s: Sequence[float]) -> TransferTime:
    """Fit latency and rate to measured times, by least squares of the relative deviations."""
    sizes, times = np.asarray(sizes_bytes, float), np.asarray(times_s, float)
    columns = np.stack([1 / times, sizes / times], axis=1)
    (latency_s, slope), *_ = np.linalg.lstsq(columns, np.ones_like(times), rcond=None)
    if latency_s < 0 or slope <= 0:
        # A line through the origin: the rate that fits best without a latency.
        ratio = sizes / times
        latency_s, slope = 0.0, float(ratio.sum() / (ratio**2).sum())
    return TransferTime(latency_s=float(latency_s), bytes_per_s=1 / float(slope))
