"""Exported programs on simulated NOR flash, which fails if a driver breaks a rule of flash."""

from pathlib import Path

from kit.shared_objects import link_program

FLASH = Path(__file__).parents[1] / "export" / "library" / "flash"
DRIVERS = {"flash_area": "zephyr.c", "esp_partition": "esp.c"}
PARTS = {name: (part, "nor.c") for name, part in DRIVERS.items()} | {"spi_flash": ("spi.c",)}
"""Source files for each driver: the stub of its SDK, and the flash."""
C = ("cc", "-std=c11", "-O0", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-ffp-contract=off")


def build_over_nor(folder, driver, program, *flags):
    """Build the program of an exported folder with a driver over simulated NOR flash.

    Writes the program to the path `program`, which it returns. `flags` are compiler flags.
    """
    parts = [
        *sorted((folder / "src").glob("*.c")),
        *(folder / "host" / f"{name}.c" for name in ("pm_run", "pm_text", "pm_host")),
        folder / "port" / f"driver_{driver}.c",
        *(FLASH / part for part in PARTS[driver]),
    ]
    return link_program([*C, *flags], parts, (folder, folder / "include", FLASH), program)


def build_power_cuts(folder, program, unit, operation, block, generations):
    """Build the program that cuts the power during steps of an exported folder.

    Writes the program to the path `program`, which it returns. `unit` is the write unit,
    `operation` the size of one program operation, `block` the erase block [B]; `generations` is
    their number.
    """
    sizes = {"PM_STORAGE_UNIT": unit, "PM_STORAGE_BLOCK": block, "OPERATION": operation}
    sizes |= {"PM_GENERATIONS": generations, "STEPS": max(5, generations + 2)}
    flags = [f"-D{macro}={size}u" for macro, size in sizes.items()]
    sources = [*sorted((folder / "src").glob("*.c")), FLASH.parent / "cuts.c"]
    includes = (folder / "include", folder, FLASH.parent)
    return link_program([*C, *flags], sources, includes, program)


def count_step_writes(made, *, commits=True):
    """Return the minimum and maximum bytes that a step writes to flash [B], and its erases.

    `made` is a deployment. The minimum assumes that padding, up to 3 bytes of each tensor of a
    generation, is not written. Without `commits`, the step only writes pages.
    """
    writes = () if made.copies_to_flash else made.page_writes
    pages = [size for size, times in writes for _ in range(times)]
    most = sum(pages) + made.commit_bytes * commits
    erases = sum(-(-size // made.layout.erase_block_bytes) for size in pages)
    return most - 3 * len(made.generation_names), most, erases + made.commit_erases * commits
