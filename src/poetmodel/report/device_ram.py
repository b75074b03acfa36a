"""Phrases about the RAM that a training step needs on a device."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from poetmodel.device.ram import KIND_NAMES, RamUse
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from poetmodel.device.ram import DeviceRam


def format_remark(device_ram: DeviceRam) -> str:
    """Return a phrase: whether the step fits the device, and the RAM that it needs."""
    return f"{'fits' if device_ram.fits else 'does not fit'}; {_describe_need(device_ram)}"


def format_warning(device_ram: DeviceRam) -> str | None:
    """Return a warning if the step does not fit, else None."""
    if device_ram.fits:
        return None
    ram, description = format_bytes(device_ram.ram_bytes), _describe_need(device_ram)
    return (
        f"the step does not fit device {device_ram.device}, which has {ram} of RAM: {description}"
    )


def _describe_need(device_ram: DeviceRam) -> str:
    """Return a phrase with the peak, resident bytes and their sum, and which is too much."""
    peak_bytes, resident_bytes = device_ram.peak_bytes, device_ram.resident_bytes
    description = f"it needs {format_bytes(peak_bytes)} at the peak"
    if resident_bytes:
        needed = format_bytes(device_ram.needed_bytes)
        description += f" and {format_bytes(resident_bytes)} of resident bytes, {needed} in all"
    if device_ram.fits:
        return description
    if peak_bytes > device_ram.ram_bytes:
        each_exceeds = resident_bytes > device_ram.ram_bytes
        return f"{description}; {'each' if each_exceeds else 'the peak'} alone is too much"
    if resident_bytes > device_ram.ram_bytes:
        return f"{description}; the resident bytes alone are too much"
    return f"{description}; together they are too much"


def format_gauge(values: Mapping[str, Any]) -> tuple[str, str]:
    """Return two phrases for a device gauge: RAM free or missing, and RAM in use by kind."""
    used_bytes = {
        name: values[entry.name] for name, entry in zip(KIND_NAMES, fields(RamUse), strict=True)
    }
    phrases = [f"{name} {format_bytes(size)}" for name, size in used_bytes.items() if size]
    free_text = f"{format_bytes(values['free_bytes'])} free"
    if values["missing_bytes"]:
        free_text = f"{format_bytes(values['missing_bytes'])} missing"
    return free_text, ", ".join(phrases)
