"""Doubtful figures of devices: powers that contradict each other, likely wrong units."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from poetmodel.device.hardware import UNITS_MEANT, figures_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.device.hardware import Device

MAX_POWER_RATIO: Final = 2.0
"""How far the power stated and the power implied by two rates may lie apart."""


def sanity_warnings(device: Device) -> tuple[str, ...]:
    """Return the doubtful values of a device, each a sentence with its figures.

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
    """Yield where a figure lies outside; zero and a figure that is not given never do."""
    for key, known, value in figures_of(device):
        if value and known.usual is not None:
            low, high = known.usual
            if not low <= value <= high:
                side = f"under {low:g}" if value < low else f"over {high:g}"
                amount, meant = f"{value:g} {known.unit}", UNITS_MEANT[known.unit]
                yield f"{key} is {amount}, {side}: is it given in {meant}?"
