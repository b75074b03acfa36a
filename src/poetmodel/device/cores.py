"""Cores that run exported C: how many instructions each does in a cycle, and where that is from."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

ASSUMED_PER_CYCLE: Final = 1.0
"""Instructions per cycle of a core without a figure."""
WITHOUT_WAITS: Final = "estimated: cycles of the core, without waits for memory"
"""Label of times and energies that are from cycles alone."""


class Core(NamedTuple):
    """A processor core whose instructions the tables of kernels count."""

    name: str
    """Its name in the `core` of device files."""
    emulated_as: str
    """The target of the exported Makefile whose code it runs: ``m3``, ``m4`` or ``m7``."""
    has_fpu: bool
    """Whether it runs floating-point instructions, which the tables count."""
    per_cycle: float | None
    """Average instructions per cycle, without waits for memory; None if it has no figure."""
    source: str
    """Where the figure is from."""


class CycleModel(NamedTuple):
    """How instructions become time: cycles of a core at a clock, times a factor for memory."""

    core: Core | None
    """The core; None if it is not known."""
    clock_hz: float
    memory_factor: float = 1.0
    """Cycles with waits for flash and caches over cycles without."""
    measured_per_cycle: float | None = None
    """Instructions per cycle that the user measured, in place of the core's."""

    @property
    def instructions_per_cycle(self) -> float:
        """Average instructions per cycle without waits for memory; 1 if the core has no figure."""
        if self.measured_per_cycle is not None:
            return self.measured_per_cycle
        if self.core is None or self.core.per_cycle is None:
            return ASSUMED_PER_CYCLE
        return self.core.per_cycle

    @property
    def instructions_per_s(self) -> float:
        """Rate of instructions, waits for memory included [1/s]."""
        return self.clock_hz * self.instructions_per_cycle / self.memory_factor

    @property
    def rate(self) -> str:
        """Instructions per cycle and clock for display."""
        per_cycle = self.instructions_per_cycle
        noun = "instruction" if per_cycle == 1 else "instructions"
        return f"{per_cycle:g} {noun} a cycle at {self.clock_hz / 1e6:g} MHz"

    @property
    def origin(self) -> str:
        """Where the instructions per cycle are from."""
        if self.measured_per_cycle is not None:
            return "given"
        if self.core is None or self.core.per_cycle is None:
            name = "this core" if self.core is None else self.core.name
            return f"assumed: {name} has no figure"
        return self.core.name

    @property
    def label(self) -> str:
        """Label of times and energies that are from this model."""
        if self.memory_factor == 1:
            return WITHOUT_WAITS
        return f"estimated: cycles of the core, times {self.memory_factor:g} for waits for memory"

    @property
    def text(self) -> str:
        """The model on one line for display."""
        return f"{self.rate} ({self.origin}); {self.label}"

    def to_dict(self) -> dict[str, str | float | None]:
        """Return the model as plain values for JSON."""
        return {
            "core": None if self.core is None else self.core.name,
            "clock_hz": self.clock_hz,
            "instructions_per_cycle": self.instructions_per_cycle,
            "memory_factor": self.memory_factor,
            "label": self.label,
        }


_MODEL: Final = (
    "pipeline model of the core, run on exported training steps, {range} cycles an instruction; it "
    "agrees with published cycle counts to 2 % for assembly and about 10 % for C without waits"
)
_NO_FIGURE: Final = "no figure: one instruction a cycle is assumed"

CORES: Final = (
    Core("Cortex-M3", "m3", has_fpu=False, per_cycle=None, source=_NO_FIGURE),
    Core("Cortex-M33", "m4", has_fpu=True, per_cycle=None, source=_NO_FIGURE),
    Core(
        "Cortex-M4", "m4", has_fpu=True, per_cycle=0.79, source=_MODEL.format(range="1.18 to 1.36")
    ),
    Core(
        "Cortex-M7", "m7", has_fpu=True, per_cycle=1.05, source=_MODEL.format(range="0.78 to 1.13")
    ),
)
"""Known cores."""


def find_core(text: str) -> Core | None:
    """Return the core that a device's `core` text names; None if it names no known core."""
    return next((core for core in CORES if re.search(rf"{core.name}(?!\d)", text)), None)


def core_of_target(target: str) -> Core:
    """Return the core of a target of the exported Makefile, which an emulator has: m3, m4 or m7."""
    name = f"Cortex-{target.upper()}"
    return next(core for core in CORES if core.name == name)
