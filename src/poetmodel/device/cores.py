"""Processor cores that execute exported C: instructions per cycle, with sources."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

ASSUMED_INSTRUCTIONS_PER_CYCLE: Final = 1.0
"""Instructions per cycle assumed for a core without a measured value."""
NO_WAITS_LABEL: Final = "estimated: cycles of the core, without waits for memory"
"""Label of times and energies computed from cycles alone."""


class Core(NamedTuple):
    """A processor core that executes exported C."""

    name: str
    """Name, as it occurs in `core` of device files."""
    makefile_target: str
    """Target of the exported Makefile that builds code for the core: ``m3``, ``m4`` or ``m7``."""
    has_fpu: bool
    """Whether the core has an FPU. Instructions of kernels are estimated for such cores only."""
    instructions_per_cycle: float | None
    """Average instructions per cycle, without waits for memory; None if unknown."""
    source: str
    """Source of `instructions_per_cycle`."""


class CycleModel(NamedTuple):
    """Converts instructions to time, by cycles of a core at a clock and a factor for memory."""

    core: Core | None
    """The core; None if unknown."""
    clock_hz: float
    """Clock of the core [Hz]."""
    memory_factor: float = 1.0
    """Ratio of cycles with waits for flash and caches to cycles without."""
    stated_instructions_per_cycle: float | None = None
    """Instructions per cycle that the user states; None for the core's value."""

    @property
    def instructions_per_cycle(self) -> float:
        """Average instructions per cycle without waits for memory."""
        if self.stated_instructions_per_cycle is not None:
            return self.stated_instructions_per_cycle
        if self.core is None or self.core.instructions_per_cycle is None:
            return ASSUMED_INSTRUCTIONS_PER_CYCLE
        return self.core.instructions_per_cycle

    @property
    def instructions_per_s(self) -> float:
        """Instruction rate, including waits for memory [1/s]."""
        return self.clock_hz * self.instructions_per_cycle / self.memory_factor

    @property
    def rate_text(self) -> str:
        """Instructions per cycle and clock for display."""
        per_cycle = self.instructions_per_cycle
        noun = "instruction" if per_cycle == 1 else "instructions"
        return f"{per_cycle:g} {noun} a cycle at {self.clock_hz / 1e6:g} MHz"

    @property
    def origin(self) -> str:
        """Source of `instructions_per_cycle`: ``given``, the core's name, or ``assumed: ...``."""
        if self.stated_instructions_per_cycle is not None:
            return "given"
        if self.core is None or self.core.instructions_per_cycle is None:
            name = "this core" if self.core is None else self.core.name
            return f"assumed: {name} was not measured"
        return self.core.name

    @property
    def label(self) -> str:
        """Label of times and energies computed with this model."""
        if self.memory_factor == 1:
            return NO_WAITS_LABEL
        return f"estimated: cycles of the core, times {self.memory_factor:g} for waits for memory"

    @property
    def text(self) -> str:
        """The model in one line for display."""
        return f"{self.rate_text} ({self.origin}); {self.label}"

    def to_dict(self) -> dict[str, str | float | None]:
        """Return core, clock, instructions per cycle, memory factor and label as JSON values."""
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
"""Source of a measured core; ``range`` is that of its cycles per instruction."""
_NOT_MEASURED: Final = "not measured: one instruction per cycle is assumed"
"""Source of a core without a measured value."""

CORES: Final = (
    Core("Cortex-M3", "m3", has_fpu=False, instructions_per_cycle=None, source=_NOT_MEASURED),
    Core("Cortex-M33", "m4", has_fpu=True, instructions_per_cycle=None, source=_NOT_MEASURED),
    Core(
        "Cortex-M4",
        "m4",
        has_fpu=True,
        instructions_per_cycle=0.79,
        source=_MODEL.format(range="1.18 to 1.36"),
    ),
    Core(
        "Cortex-M7",
        "m7",
        has_fpu=True,
        instructions_per_cycle=1.05,
        source=_MODEL.format(range="0.78 to 1.13"),
    ),
)
"""Known cores."""


def find_core(text: str) -> Core | None:
    """Return the first of `CORES` that a device's `core` text names; None if it names none."""
    return next((core for core in CORES if re.search(rf"{core.name}(?!\d)", text)), None)


def core_for_target(target: str) -> Core:
    """Return the core named like a target of the exported Makefile: ``m3``, ``m4`` or ``m7``."""
    name = f"Cortex-{target.upper()}"
    return next(core for core in CORES if core.name == name)
