"""What the files around an exported step say: the words that fill in their templates."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from poetmodel.export.deployment import WeightsFormat
from poetmodel.export.emitter import elements
from poetmodel.lowered.step import DataType
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from poetmodel.export.deployment import Deployment
    from poetmodel.lowered.step import LoweredStep


def template_words(deployment: Deployment) -> Mapping[str, str]:
    """Return what stands for each ``@WORD@`` of a template, but for the command."""
    step, plan = deployment.step, deployment.plan
    inputs = ", ".join(f"`{value.name}` {list(value.shape)}" for value in step.inputs)
    trains = step.learning_rate is not None
    shared = deployment.shared_kernels or ""
    return {
        "NAME": step.graph.name,
        "TITLE": re.sub(r"[^\w .,+-]", " ", step.graph.name.encode("ascii", "replace").decode()),
        "PREFIX": deployment.prefix,
        "UPPER": deployment.prefix.upper(),
        "DEVICE": plan.device or "no device",
        "RAM": format_bytes(deployment.ram_bytes),
        "WHAT": _what(step),
        "ROWS": "\n".join(f"| {what} | {size:,} |" for what, size in deployment.ram_map().items()),
        "FLASH": _flash(deployment),
        "INPUTS": inputs,
        "POINTERS": ", ".join(f"x{k}" for k in range(len(step.inputs))),
        "ALIGNMENT": str(deployment.arena.alignment),
        "RATE": str(step.learning_rate if trains else 0),
        "READ": f"pm_read_{'state(0, weights)' if trains else 'gradient(0, gradient)'}",
        "LEARNING": _LEARNING.format(rate=step.learning_rate) if trains else _NOT_LEARNING,
        "WRITTEN": _STATE_WRITTEN if trains else _GRADIENTS_WRITTEN,
        "BEGIN": _RESUME if deployment.commit else _INIT,
        "STORAGE": _storage(deployment),
        "STORED": str(deployment.stored_bytes),
        "PAGED": "y" if deployment.slots else "n",
        "ESPSTORAGE": "ram;esp_partition" * deployment.saves
        or "esp_partition" * bool(deployment.slots),
        "MEMORY": _MEMORY if deployment.saves else "",
        "SHARED": shared,
        "COMPONENT": shared.rpartition("/")[2],
        "KERNELS": _KERNELS.format(folder=shared) if shared else "",
        **dict(_sketch(deployment)),
        **{sdk: _paged(text, deployment) for sdk, text in _PAGED.items()},
        "WEIGHTS": _BINARY if deployment.weights is WeightsFormat.BINARY else "",
        "COMMIT": _committed(deployment),
        "INFER": _inference(step.inference),
    }


def _flash(deployment: Deployment) -> str:
    """Return a table of what the step takes of flash, where the device states its size."""
    rows = "".join(f"\n| {what} | {size:,} |" for what, size in deployment.flash_map().items())
    return f"\n{_FLASH}{rows}" if rows else ""


def _what(step: LoweredStep) -> str:
    """Return what a step does with the gradients."""
    if step.learning_rate is None:
        return "hands out the gradients"
    if step.accumulate == 1:
        return "updates all trained parameters"
    return (
        "adds the gradients of one batch to those in the state; with each "
        f"{step.accumulate} batches it updates all trained parameters once"
    )


def _sketch(deployment: Deployment) -> Iterator[tuple[str, str]]:
    """Yield what an Arduino sketch says of a step: its arrays, and the wires to its storage."""
    inputs = [(k, value, elements(value)) for k, value in enumerate(deployment.step.inputs)]
    yield "ARRAYS", "\n".join(f"static {v.type.c_name} x{k}[{size}];" for k, v, size in inputs)
    noise = {
        DataType.REAL: "random(-1000, 1001) / 1000.0f",
        DataType.UINT8: "random(256)",
        DataType.INT8: "random(-128, 128)",
    }
    yield (
        "FILL",
        "\n".join(
            f"    for (int k = 0; k < {size}; k++) x{n}[k] = {noise.get(v.type, '0')};"
            for n, v, size in inputs
        ),
    )
    in_place = deployment.plan.memory_mapped and not deployment.saves
    over_spi = bool(deployment.slots) and not in_place
    yield "SPI", _SPI if over_spi else ""
    yield "SELECT", _SELECT if over_spi else ""
    files = ("Train.ino", *["storage.c"] * bool(deployment.slots), *["flash.c"] * deployment.saves)
    yield "SKETCH", ", ".join(f'"{name}"' for name in files)
    yield "SKETCHBEGIN", (_RESUME if deployment.commit else _INIT).replace("\n", "\n    ")


def command_block(command: str) -> str:
    """Return what made a folder as a block of a shell, or of Python."""
    language = "python" if command.startswith("import ") else "sh"
    return f"```{language}\n{command}\n```"


def _storage(deployment: Deployment) -> str:
    """Return how an application gives a step its storage."""
    if not deployment.slots:
        return "The plan pages nothing: no driver of storage is needed."
    layout = deployment.page_layout
    turns = "" if not deployment.commit else _TURNS.format(generations=deployment.generations)
    if deployment.saves:
        own = deployment.layout
        turns = _SAVED.format(
            saved=deployment.saved_bytes,
            block=own.erase_block_bytes,
            unit=own.write_unit_bytes,
            generations=deployment.generations,
        )
    return _STORAGE.format(
        slots=len(deployment.slots),
        stored=deployment.stored_bytes,
        block=layout.erase_block_bytes,
        unit=layout.write_unit_bytes,
        mapped=_MAPPED if deployment.plan.memory_mapped else "",
        turns=turns,
    )


def _paged(text: str, deployment: Deployment) -> str:
    """Return where an SDK puts pages, if there are any."""
    size, upper = deployment.saved_bytes or deployment.stored_bytes, deployment.prefix.upper()
    chip = "a driver of yours" if deployment.plan.memory_mapped else "a flash chip on the SPI bus"
    device, at = deployment.device, _EXAMPLE_ADDRESS
    if device is not None and device.flash is not None and device.commits_to_flash:
        at = device.flash.size_bytes - size
    return text.format(size=size, at=at, upper=upper, chip=chip) if deployment.slots else ""


def _committed(deployment: Deployment) -> str:
    """Return what holds where a step commits."""
    if not deployment.commit:
        return ""
    every = deployment.commit_every
    when = "every step" if every == 1 else f"the last step of {every} (`PM_COMMIT_EVERY`)"
    sums = _SUMS if deployment.checksum else "It has no checksums.\n"
    return _COMMIT.format(when=when) + sums


def _inference(inference: LoweredStep | None) -> str:
    if inference is None or inference.output is None:
        return ""
    shape = list(inference.output.shape)
    count = len(inference.inputs)
    inputs = "input" if count == 1 else f"{count} inputs"
    return _INFER.format(inputs=inputs, shape=shape)


_FLASH: Final = """
| flash (code is estimated: a Cortex-M4, `-O2`) | bytes |
|---|---|"""

_LEARNING: Final = """\
The learning rate is that of the optimizer's first group of trained parameters; the others keep
  their proportion to it. When this was exported it was {rate}."""
_NOT_LEARNING: Final = """\
There is no optimizer: a step leaves state as it is, in flash, and reads no learning rate.
  Gradients are in the order of `PM_GRADIENT_...`; each stays on storage until the next step."""
_STATE_WRITTEN: Final = """\
all state tensors, in the order of `manifest.json`, which `poetmodel state` lists.
`poetmodel.torch.load_state` reads it into the model, and `save_state` writes such a file, which
`state=FILE` after the four arguments begins with."""
_GRADIENTS_WRITTEN: Final = "the gradients of the last step, in the order of `manifest.json`."

_INIT: Final = "int error = pm_init();"
_RESUME: Final = """\
int error = pm_resume();                        /* after a restart: what the last commit left */
if (error == PM_RESUMED_OLDER) error = PM_OK;   /* or the one before, where that is damaged */
if (error == PM_ERROR_EMPTY) error = pm_init(); /* there is none; with other errors ask again */
/* PM_ERROR_OTHER: another program's state is there; pm_init would start anew over it */"""

_SPI: Final = """
#ifndef ARDUINO_ARCH_ESP32
#include <SPI.h>

static const int FLASH_SELECT = 10; /* the pin that selects the flash chip */

/* What storage.c asks of the bus. */
extern "C" int pm_spi_transfer(
    const uint8_t *command, uint32_t command_bytes, const uint8_t *out, uint8_t *in, uint32_t bytes)
{
    SPI.beginTransaction(SPISettings(8000000, MSBFIRST, SPI_MODE0));
    digitalWrite(FLASH_SELECT, LOW);
    for (uint32_t k = 0; k < command_bytes; k++) SPI.transfer(command[k]);
    for (uint32_t k = 0; k < bytes; k++) {
        const uint8_t received = SPI.transfer(out ? out[k] : 0);
        if (in) in[k] = received;
    }
    digitalWrite(FLASH_SELECT, HIGH);
    SPI.endTransaction();
    return PM_OK;
}
#endif
"""

_SELECT: Final = """\
#ifndef ARDUINO_ARCH_ESP32
    pinMode(FLASH_SELECT, OUTPUT);
    digitalWrite(FLASH_SELECT, HIGH);
    SPI.begin();
#endif
"""

_STORAGE: Final = """\
The plan keeps {slots} slots on storage, whose sizes `pm_slot_bytes` has. Compile one driver of
`port/` too, or write one: the two functions of `port/pm_storage.h`, which read and write bytes, in
a file that includes `port/pm_pages.h`; or, for a storage with DMA, `pm_page_out`, `pm_page_in` and
`pm_page_wait` of the header.{mapped}

| driver | storage |
|---|---|
| `port/driver_ram.c` | memory that the step may not use otherwise, mapped SDRAM or PSRAM too |
| `port/driver_spi_flash.c` | serial NOR flash; give it the one function of `port/pm_spi.h` |
| `port/driver_flash_area.c` | Zephyr: node label `pm_partition`, or `PM_PARTITION` |
| `port/driver_esp_partition.c` | ESP-IDF: partition `"pm_pages"`, or `PM_PARTITION` (16 letters) |

Storage takes {stored:,} B (`PM_STORED_BYTES`): it is erased in blocks of {block:,} B
(`PM_STORAGE_BLOCK`) and written in units of {unit} B (`PM_STORAGE_UNIT`). Flash wears, and drivers
level nothing: a page keeps its blocks, which are erased whenever it is written.{turns} Where others
use the same chip or partition, `PM_FLASH_START` is where storage begins.
"""

_TURNS: Final = """ State is
written to {generations:,} places in turn (`PM_GENERATIONS`, which may be less, from 2 on); a block
that has room for several is erased for the first of them alone."""
_MEMORY: Final = """
  zephyr_library_sources("${CMAKE_CURRENT_LIST_DIR}/../port/driver_ram.c")"""
_SAVED: Final = """

This storage forgets without power (`PM_VOLATILE`), so state is written to flash apart, {saved:,} B
(`PM_COMMITTED_BYTES`) in blocks of {block:,} B (`PM_COMMIT_BLOCK`) and units of {unit} B
(`PM_COMMIT_UNIT`), to {generations:,} places in turn (`PM_GENERATIONS`); a block that has room for
several is erased for the first of them alone. Compile two drivers: one
of memory, `port/driver_ram.c` with `PM_STORAGE_ADDRESS` as where it is mapped, and one of flash, or
`pm_flash_read` and `pm_flash_write` of `port/pm_storage.h`. Slots from `PM_PAGE_SLOTS` on are in
flash."""
_EXAMPLE_ADDRESS: Final = 0xC0000

_PAGED: Final = {
    "CMAKE": """
`set(PM_STORAGE spi_flash)` before `add_subdirectory` compiles `port/driver_spi_flash.c` too, and so
on; without it the functions of `port/pm_storage.h` are the application's.
""",
    "ZEPHYR": """ Its pages go to a partition of
the board's overlay, at an address where nothing else lies, unless
`CONFIG_POETMODEL_{upper}_FLASH_AREA=n`. Before Zephyr 4.4 a partition has no `compatible`:

```dts
&flash0 {{ partitions {{ pm_partition: partition@{at:x} {{
    compatible = "zephyr,mapped-partition"; reg = <{at:#x} {size:#x}>;
}}; }}; }};
```""",
    "ESP": """ Its
pages go to a partition of `partitions.csv`, unless `PM_STORAGE` is set to nothing:

```text
pm_pages, data, undefined, , {size:#x}
```""",
    "ARDUINO": """ Its `storage.c`
says where pages go: a partition as of ESP-IDF on an ESP32, else {chip}.""",
}
"""Where pages go in each SDK."""

_MAPPED: Final = """ The core reads this storage like RAM: write `pm_storage_address`
too, or `pm_page_address`, `pm_page_write` and `pm_page_check`. Without `--commit` a step reads a
block while it writes it, which RAM, FRAM and MRAM allow; flash is erased by blocks and needs
`--commit`."""

_BINARY: Final = """
The weights are `src/pm_weights.bin`: define `PM_WEIGHTS_FILE` as its path, in quotes.
"""

_KERNELS: Final = """
The kernels are in `{folder}`, with those of other networks: compile its `src/*.c` once, with its
`include/` for all sources. CMake finds it; for Zephyr, ESP-IDF and Arduino it is a module, a
component or a library of its own.
"""

_COMMIT: Final = """
Storage has generations of all state, of which one is whole whenever the power goes: {when}
writes the next one. Begin with `pm_resume`, which gives back what the last commit left. Only
`PM_ERROR_EMPTY` says that there is nothing: begin with `pm_init` then. `PM_RESUMED_OLDER` is no
error: the newest generation is damaged, and the one before was taken. `PM_ERROR_CHECKSUM` says that
all are damaged, `PM_ERROR_OTHER` that the state is another program's or another instance's
(`PM_INSTANCE_ID`), which `pm_init` starts anew over, and any other error that storage did not
answer: nothing was changed, ask again.
After `PM_TORN`, `pm_resume` takes the step back. `pm_steps` were done. `pm_write_state` writes a
generation too: all of it holds, or nothing.
"""
_SUMS: Final = """\
State has checksums on storage: it is checked when it is read, and where the core reads it as it
lies, by `pm_resume`. A page that is wrong ends a step with `PM_ERROR_CHECKSUM` or `PM_TORN`.
"""

_INFER: Final = """
`pm_infer(inputs, outputs)` says between steps what the model says now, in evaluation mode: it reads
the first {inputs} of a step, and writes an array of {shape}.
"""
