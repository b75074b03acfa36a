"""Exported programs over NOR flash of a test, which holds drivers to the rules of flash."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final

FLASH: Final = Path(__file__).parents[1] / "export" / "library" / "flash"
DRIVERS: Final = {"flash_area": "zephyr.c", "esp_partition": "esp.c"}
PARTS: Final = {name: (part, "nor.c") for name, part in DRIVERS.items()} | {"spi_flash": ("spi.c",)}
"""Drivers, each with what stands for its SDK."""
C: Final = (
    "cc",
    "-std=c11",
    "-O1",
    "-Wall",
    "-Wextra",
    "-Wpedantic",
    "-Werror",
    "-ffp-contract=off",
)


def over_nor(folder: Path, driver: str, program: Path, *flags: str) -> Path:
    """Build the program of an exported folder with a driver over such flash, and return it."""
    parts = [
        *sorted((folder / "src").glob("*.c")),
        *(folder / "host" / f"{name}.c" for name in ("pm_run", "pm_text", "pm_host")),
        folder / "port" / f"driver_{driver}.c",
        *(FLASH / part for part in PARTS[driver]),
    ]
    includes = (f"-I{folder}", f"-I{folder / 'include'}", f"-I{FLASH}", *flags)
    command = [*C, *includes, *parts, "-lm", "-o", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return program
