"""Warnings about implausible devices: contradictory powers, rates, and probably wrong units."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from poetmodel.device.hardware import UNIT_NAMES, quantity_values

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.device.hardware import Device

MAX_POWER_RATIO: Final = 2.0
"""Maximum ratio between the stated power and ``flops_per_s / flops_per_j``, either way."""


def sanity_warnings(device: Device) -> tuple[str, ...]:
    """Return a warning for each implausible value of a device.

    Plausible: the stated and the implied power (``flops_per_s / flops_per_j``) differ by at most a
    factor of 2, storage is no faster than RAM, and quantities are in their typical range (else the
    unit is probably wrong).
    """
    return (*_power_warnings(device), *_rate_warnings(device), *_unit_warnings(device))


def _power_warnings(device: Device) -> Iterator[str]:
    """Yield a warning if ``flops_per_s / flops_per_j`` and ``power_w`` contradict each other."""
    compute = device.compute
    if compute.flops_per_j is None or compute.power_w is None:
        return
    implied_w = compute.flops_per_s / compute.flops_per_j
    low, high = sorted((implied_w, compute.power_w))
    if high > MAX_POWER_RATIO * low:
        ratio = f"{high / low:.3g} times" if low > 0 else "infinitely far"
        yield (
            f"[compute] flops_per_s / flops_per_j implies {implied_w:.3g} W, but power_w is "
            f"{compute.power_w:.3g} W, {ratio} apart; energy follows flops_per_j"
        )


def _rate_warnings(device: Device) -> Iterator[str]:
    """Yield a warning for each direction in which storage is faster than RAM."""
    if device.storage is None or device.compute.bytes_per_s is None:
        return
    for key in ("page_in", "page_out"):
        rate = getattr(device.storage, key).bytes_per_s
        if rate > device.compute.bytes_per_s:
            yield (
                f"[storage.{key}] bytes_per_s is {rate:.3g} B/s, above the RAM bandwidth of "
                f"{device.compute.bytes_per_s:.3g} B/s that [compute] gives"
            )


def _unit_warnings(device: Device) -> Iterator[str]:
    """Yield a warning for each quantity outside its typical range; skips 0 and None."""
    for key, quantity, value in quantity_values(device):
        if value and quantity.typical_range is not None:
            low, high = quantity.typical_range
            if not low <= value <= high:
                bound_text = f"under {low:g}" if value < low else f"over {high:g}"
                value_text, unit_name = f"{value:g} {quantity.unit}", UNIT_NAMES[quantity.unit]
                yield f"{key} is {value_text}, {bound_text}: is it given in {unit_name}?"
