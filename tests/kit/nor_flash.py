"""Exported programs on simulated NOR flash, which checks that drivers follow the rules of flash."""

from pathlib import Path

from kit.programs import done

FLASH = Path(__file__).parents[1] / "export" / "library" / "flash"
DRIVERS = {"flash_area": "zephyr.c", "esp_partition": "esp.c"}
PARTS = {name: (part, "nor.c") for name, part in DRIVERS.items()} | {"spi_flash": ("spi.c",)}
"""Drivers, each with the stub of its SDK."""
C = ("cc", "-std=c11", "-O1", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-ffp-contract=off")


def over_nor(folder, driver, program, *flags):
    """Build the program of an exported folder with a driver over such flash, and return it."""
    parts = [
        *sorted((folder / "src").glob("*.c")),
        *(folder / "host" / f"{name}.c" for name in ("pm_run", "pm_text", "pm_host")),
        folder / "port" / f"driver_{driver}.c",
        *(FLASH / part for part in PARTS[driver]),
    ]
    includes = (f"-I{folder}", f"-I{folder / 'include'}", f"-I{FLASH}", *flags)
    command = [*C, *includes, *parts, "-lm", "-o", program]
    done(command, folder)
    return program


def power_cuts(folder, program, unit, operation, block, generations):
    """Build the program that cuts the power of an exported folder, and return its path.

    `unit` is the write unit, `operation` what an operation programs, `block` the erase block [B].
    """
    sizes = {"PM_STORAGE_UNIT": unit, "PM_STORAGE_BLOCK": block, "OPERATION": operation}
    sizes |= {"PM_GENERATIONS": generations, "STEPS": max(5, generations + 2)}
    flags = [f"-D{macro}={size}u" for macro, size in sizes.items()]
    includes = (f"-I{folder / 'include'}", f"-I{folder}", f"-I{FLASH.parent}")
    sources = [*sorted((folder / "src").glob("*.c")), FLASH.parent / "cuts.c"]
    done([*C, *flags, *includes, *sources, "-lm", "-o", program], folder)
    return program


def step_writes(made, *, commits=True):
    """Return the minimum and maximum bytes that a step writes to flash, and its erases."""
    writes = () if made.copies_to_flash else made.page_writes
    pages = [size for size, times in writes for _ in range(times)]
    most = sum(pages) + made.commit_bytes * commits
    erases = sum(-(-size // made.layout.erase_block_bytes) for size in pages)
    return most - 3 * len(made.generation_names), most, erases + made.commit_erases * commits
