"""Profiles of a joint graph's operations, and rates of this machine: measured and cached."""

from __future__ import annotations

import os
from functools import cache
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from poetmodel.device import Device
from poetmodel.device.hardware import Compute
from poetmodel.torch.cache import Cache, digest, host_key, plain_layout
from poetmodel.torch.graph.profiles import OpProfile, OpProfiler, profile_on_synthetic
from poetmodel.torch.graph.tensors import fake_value, tensors_in
from poetmodel.torch.planning.profiles import find_graph_key, load_or_measure

if TYPE_CHECKING:
    from collections.abc import Callable

    from poetmodel.torch.dynamo.joint_graph import JointGraph


CALL_S: Final = 5e-6
"""Time of an operation besides its kernel: PyTorch's dispatcher and the interpreter [s]."""
_MATRIX_SIZE: Final = 1024
"""Number of rows, and of columns, of the matrices in the measured product."""
_COPIED_BYTES: Final = 2**26
"""Size of the measured copy [B]."""


class Profiles:
    """Profiles of operations, measured now or earlier; predicted for kernels if `is_generated`.

    Without `measures_times`, times are not usable: those of first calls, or 0.
    """

    def __init__(
        self,
        cache: Cache,
        *,
        measures_times: bool,
        is_generated: Callable[[fx.Node], bool] | None = None,
    ) -> None:
        self._cache = cache
        self._profiler = OpProfiler(measure_times=measures_times)
        self._is_generated = is_generated

    def find(self, joint: JointGraph) -> list[OpProfile]:
        """Return the profiles of a graph's operations: from the cache, or measured and then cached.

        Operations with effects, collectives and generated kernels retain predicted profiles.
        """
        predicted_profiles = {
            operation.node: operation.profile for operation in joint.step_graph.operations
        }
        profiles = load_or_measure(
            self._cache,
            find_graph_key(joint.graph, lambda: self._describe(joint)),
            joint.graph,
            lambda: profile_on_synthetic(
                joint.graph, predicted_profiles, self._profiler, is_generated=self._is_generated
            ),
        )
        return [profiles[node] for node in predicted_profiles]

    def _describe(self, joint: JointGraph) -> list[Any]:
        """Return what profiles depend on besides the graph: layouts of inputs, and options."""
        inputs = [list(map(plain_layout, tensors_in(fake_value(node)))) for node in joint.arguments]
        return [inputs, self._profiler.measures_times, self._is_generated is not None]


# -- a machine as a device ------------------------------------------------------------------------


def load_machine_rates(cache: Cache) -> tuple[float, float]:
    """Return (FLOP/s of a matrix product, B/s read and written by a copy), measured once."""
    rates = cache.read("rates", digest(host_key()))
    if rates is None:
        rates = _measure_rates()
        cache.write("rates", digest(host_key()), rates)
    flops_per_s, bytes_per_s = rates
    return flops_per_s, bytes_per_s


def host_device(rates: tuple[float, float]) -> Device:
    """Return this machine as a device with rates [FLOP/s, B/s], 1 W and no storage."""
    flops_per_s, bytes_per_s = rates
    return Device(
        name="this machine",
        ram_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        compute=Compute(flops_per_s=flops_per_s, power_w=1.0, bytes_per_s=bytes_per_s),
        source="a matrix product and a copy, measured; a nominal 1 W",
    )


@cache
def _measure_rates() -> tuple[float, float]:
    """Measure (FLOP/s of a matrix product, B/s read and written by a copy) on the CPU."""
    with _disable_current_modes(), torch.no_grad():
        matrix = torch.ones(_MATRIX_SIZE, _MATRIX_SIZE, device="cpu")
        source = torch.ones(_COPIED_BYTES // 4, device="cpu")
        target = torch.empty_like(source)
        product_s = _min_time_s(lambda: torch.mm(matrix, matrix))
        copy_s = _min_time_s(lambda: target.copy_(source))
    return 2 * _MATRIX_SIZE**3 / product_s, 2 * _COPIED_BYTES / copy_s


def _min_time_s(work: Callable[[], object]) -> float:
    """Call a function three times; return the shortest time [s]."""
    shortest_s = float("inf")
    for _ in range(3):
        begin_s = perf_counter()
        work()
        shortest_s = min(shortest_s, perf_counter() - begin_s)
    return shortest_s
