"""Figures of a device that are possible but hardly true."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.device.hardware import Device

MAX_POWER_RATIO: Final = 2.0
"""How far the power stated and the power implied by two rates may lie apart."""


@dataclass(frozen=True, slots=True)
class _Range:
    """What a figure usually lies in, and what it should be given in."""

    low: float
    high: float
    unit: str
    meant: str

    def warnings(self, where: str, value: float | None) -> Iterator[str]:
        """Yield one where a figure lies outside; zero and a figure that is not given never do."""
        if value and not self.low <= value <= self.high:
            side = f"under {self.low:g}" if value < self.low else f"over {self.high:g}"
            yield f"{where} is {value:g} {self.unit}, {side}: is it given in {self.meant}?"


_BYTES: Final = _Range(1e3, 2.0**50, "B", "bytes")
_LATENCY: Final = _Range(0.0, 1.0, "s", "seconds")
_BYTE_RATE: Final = _Range(1e3, 1e13, "B/s", "bytes per second")
_FLOP_RATE: Final = _Range(1e3, 1e16, "FLOP/s", "FLOP per second")
_EFFICIENCY: Final = _Range(1e3, 1e15, "FLOP/J", "FLOP per joule")
_POWER: Final = _Range(1e-6, 1e3, "W", "watts")


def sanity_warnings(device: Device) -> tuple[str, ...]:
    """Return what looks wrong in a device, each a sentence with its figures.

    Three things are looked at: whether the power stated and the one implied
    (``flops_per_s / flops_per_j``) differ by more than a factor of 2; whether storage is faster
    than RAM, where the RAM bandwidth is given; whether a figure is so small or large that it was
    probably given in another unit.
    """
    return (*_power(device), *_rates(device), *_units(device))


def _power(device: Device) -> Iterator[str]:
    compute = device.compute
    if compute.flops_per_j is None or compute.power_w is None:
        return
    implied_w = compute.flops_per_s / compute.flops_per_j
    low, high = sorted((implied_w, compute.power_w))
    if high > MAX_POWER_RATIO * low:
        ratio = f"{high / low:.3g} times" if low > 0 else "infinitely far"
        yield (
            f"[compute] flops_per_s / flops_per_j implies {implied_w:.3g} W, but power_w says "
            f"{compute.power_w:.3g} W, {ratio} apart; energy follows flops_per_j"
        )


def _rates(device: Device) -> Iterator[str]:
    if device.storage is None or device.compute.bytes_per_s is None:
        return
    for key in ("page_in", "page_out"):
        rate = getattr(device.storage, key).bytes_per_s
        if rate > device.compute.bytes_per_s:
            yield (
                f"[storage.{key}] bytes_per_s is {rate:.3g} B/s, above the RAM bandwidth of "
                f"{device.compute.bytes_per_s:.3g} B/s that [compute] gives"
            )


def _units(device: Device) -> Iterator[str]:
    compute = device.compute
    yield from _BYTES.warnings("ram_bytes", device.ram_bytes)
    yield from _BYTES.warnings("aux_bytes", device.aux_bytes)
    yield from _POWER.warnings("idle_power_w", device.idle_power_w)
    yield from _FLOP_RATE.warnings("[compute] flops_per_s", compute.flops_per_s)
    yield from _EFFICIENCY.warnings("[compute] flops_per_j", compute.flops_per_j)
    yield from _BYTE_RATE.warnings("[compute] bytes_per_s", compute.bytes_per_s)
    yield from _POWER.warnings("[compute] power_w", compute.power_w)
    if device.storage is None:
        return
    for key in ("page_in", "page_out"):
        transfer = getattr(device.storage, key)
        where = f"[storage.{key}]"
        yield from _LATENCY.warnings(f"{where} latency_s", transfer.latency_s)
        yield from _BYTE_RATE.warnings(f"{where} bytes_per_s", transfer.bytes_per_s)
        yield from _POWER.warnings(f"{where} power_w", transfer.power_w)
