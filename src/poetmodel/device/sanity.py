"""Figures of a device that are possible but hardly true."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from poetmodel.device.hardware import parts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.device.hardware import Device

MAX_POWER_RATIO: Final = 2.0
"""How far the power stated and the power implied by two rates may lie apart."""


class _Usual(NamedTuple):
    """The range that a figure usually lies in, its unit, and what it should be given in."""

    low: float
    high: float
    unit: str
    meant: str


_BYTES: Final = _Usual(1e3, 2.0**50, "B", "bytes")
_POWER: Final = _Usual(1e-6, 1e3, "W", "watts")
_USUAL: Final = {
    "ram_bytes": _BYTES,
    "aux_bytes": _BYTES,
    "idle_power_w": _POWER,
    "flops_per_s": _Usual(1e3, 1e16, "FLOP/s", "FLOP per second"),
    "flops_per_j": _Usual(1e3, 1e15, "FLOP/J", "FLOP per joule"),
    "latency_s": _Usual(0.0, 1.0, "s", "seconds"),
    "bytes_per_s": _Usual(1e3, 1e13, "B/s", "bytes per second"),
    "power_w": _POWER,
}


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
    """Yield where a figure lies outside; zero and a figure that is not given never do."""
    for where, part in parts(device):
        for key, usual in _USUAL.items():
            value = getattr(part, key, None)
            if value and not usual.low <= value <= usual.high:
                side = f"under {usual.low:g}" if value < usual.low else f"over {usual.high:g}"
                amount = f"{value:g} {usual.unit}"
                yield f"{where}{key} is {amount}, {side}: is it given in {usual.meant}?"
