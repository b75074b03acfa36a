"""Power: what turns measured times into energies, and where the figure comes from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from poetmodel.device import Device

RAPL: Final = Path("/sys/class/powercap")
"""Where Linux shows the energy counters of processors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """Power while computing and while paging."""

    compute_w: float
    """While computing [W]."""
    page_in_w: float
    """While reading pages [W]."""
    page_out_w: float
    """While writing pages [W]."""
    source: str
    """Where the figures come from, for people."""


NOMINAL: Final = Power(
    compute_w=1.0,
    page_in_w=1.0,
    page_out_w=1.0,
    source=(
        "a nominal 1 W (no device was given and no energy counter can be read): energies are "
        "proportional to times"
    ),
)


def power_of(device: Device) -> Power:
    """Return the power figures of a device.

    Parameters
    ----------
    device : Device
        One that describes this host; where it gives FLOP per joule only, its power is its FLOP
        rate over that. Without storage, paging takes the power of computing.
    """
    compute = device.compute
    compute_w = compute.power_w
    if compute_w is None:
        compute_w = compute.flops_per_s / (compute.flops_per_j or compute.flops_per_s)
    storage = device.storage
    return Power(
        compute_w=compute_w,
        page_in_w=compute_w if storage is None else storage.page_in.power_w,
        page_out_w=compute_w if storage is None else storage.page_out.power_w,
        source=f"the power figures of device {device.key or device.name}",
    )


def measured_power(work: Callable[[], None], *, folder: Path = RAPL) -> Power | None:
    """Measure the power of the processor while it works, with its energy counters (RAPL).

    Parameters
    ----------
    work : callable
        Something typical that takes some tenths of a second.
    folder : Path
        Where the counters are.

    Returns
    -------
    Power or None
        The same power for computing and paging, of all packages together, idle power included;
        None where no counter can be read.
    """
    before = _counters(folder)
    if not before:
        return None
    begin = perf_counter()
    work()
    time_s = perf_counter() - begin
    after = _counters(folder)
    energy_uj = sum(
        (after[path] - count) % (_largest(path) + 1)
        for path, count in before.items()
        if path in after
    )
    power_w = energy_uj / 1e6 / time_s
    return Power(
        compute_w=power_w,
        page_in_w=power_w,
        page_out_w=power_w,
        source=f"RAPL counters: {power_w:.1f} W for {len(before)} package(s), idle power included",
    )


def _counters(folder: Path) -> dict[Path, int]:
    """Return the energy counter of each package that can be read [uJ]."""
    counts = {}
    for package in sorted(folder.glob("intel-rapl:*")):
        if package.name.count(":") == 1:
            try:
                counts[package] = int((package / "energy_uj").read_text())
            except (OSError, ValueError):
                continue
    return counts


def _largest(package: Path) -> int:
    """Return the value after which a counter begins again at 0 [uJ]."""
    try:
        return int((package / "max_energy_range_uj").read_text())
    except (OSError, ValueError):
        return 2**63
