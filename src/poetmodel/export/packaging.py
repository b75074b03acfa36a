"""Template values that need no generated C, and the command in the README."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from poetmodel.export.options import WeightsFormat
from poetmodel.lowered.calls import DataType
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from poetmodel.export.deployment import Deployment
    from poetmodel.export.templates import TemplateValues
    from poetmodel.lowered.step import LoweredStep

_EXAMPLE_ADDRESS: Final = 0xC0000
"""Start address of the example partition unless the device commits to its flash."""


def folder_template_values(deployment: Deployment) -> TemplateValues:
    """Return the template values that need no generated C, except ``COMMAND``."""
    step, plan = deployment.step, deployment.plan
    has_updates = step.learning_rate is not None
    shared_folder = deployment.options.shared_path or ""
    return {
        "NAME": step.graph.name,
        "TITLE": re.sub(r"[^\w .,+-]", " ", step.graph.name.encode("ascii", "replace").decode()),
        "PREFIX": deployment.options.prefix,
        "UPPER": deployment.options.prefix.upper(),
        "DEVICE": plan.device or "no device",
        "RAM": format_bytes(deployment.ram_bytes),
        "RAM_BYTES": deployment.ram_bytes,
        "STACK_BYTES": deployment.stack_bytes,
        "RAM_ROWS": _table_rows(deployment.ram_map()),
        "FLASH_ROWS": _table_rows(deployment.flash_map()),
        "INPUTS": ", ".join(f"`{tensor.name}` {list(tensor.shape)}" for tensor in step.inputs),
        "POINTERS": ", ".join(f"x{k}" for k in range(len(step.inputs))),
        "TRAINS": has_updates,
        "RATE": str(step.learning_rate if has_updates else 0),
        "BINARY": deployment.options.weights is WeightsFormat.BINARY,
        "SHARED": shared_folder,
        "COMPONENT": shared_folder.rpartition("/")[2],
        **_inference_values(step.inference),
        **_storage_values(deployment),
        **dict(_sketch_values(deployment)),
    }


def _table_rows(sizes: Mapping[str, int]) -> str:
    return "\n".join(f"| {use} | {size:,} |" for use, size in sizes.items())


def _storage_values(deployment: Deployment) -> TemplateValues:
    """Return the template values for storage: pages, generations, samples, an example partition."""
    layout, pages = deployment.layout, deployment.page_layout
    reads_in_place = deployment.plan.memory_mapped and not deployment.copies_to_flash
    partition_bytes, device, address = (
        deployment.saved_bytes or deployment.stored_bytes,
        deployment.device,
        None,
    )
    if device.flash is not None and device.commits_to_flash:
        address = device.flash.size_bytes - partition_bytes
    return {
        "SLOTS": len(deployment.slots),
        "STORAGE": deployment.uses_storage,
        "SAMPLE_SIZE": f"{0 if deployment.replay is None else deployment.replay.sample_bytes:,}",
        "MAPPED": deployment.plan.memory_mapped,
        "IN_MEMORY": deployment.copies_to_flash
        or (deployment.plan.memory_mapped and not deployment.commit),
        "SPI": deployment.uses_storage and not reads_in_place,
        "COMMIT": deployment.commit,
        "COMMIT_EVERY": deployment.commit_every,
        "ONLY_NTH": deployment.commit_every > 1,
        "CHECKSUM": deployment.options.checksum,
        "VOLATILE": deployment.copies_to_flash,
        "GENERATIONS": max(1, deployment.generations),
        "GENERATIONS_SIZE": f"{deployment.generations:,}",
        "PAGE_UNIT": pages.write_unit_bytes,
        "PAGE_BLOCK": pages.erase_block_bytes,
        "PAGE_BLOCK_SIZE": f"{pages.erase_block_bytes:,}",
        "COMMIT_UNIT": layout.write_unit_bytes,
        "COMMIT_BLOCK": layout.erase_block_bytes,
        "COMMIT_BLOCK_SIZE": f"{layout.erase_block_bytes:,}",
        "STORED_BYTES": deployment.stored_bytes,
        "STORED_SIZE": f"{deployment.stored_bytes:,}",
        "SAVED_SIZE": f"{deployment.saved_bytes:,}",
        "PARTITION_SIZE": f"{partition_bytes:#x}",
        "EXAMPLE_ADDRESS": f"{_EXAMPLE_ADDRESS if address is None else address:x}",
    }


def _inference_values(inference: LoweredStep | None) -> TemplateValues:
    """Return the template values for ``pm_infer``; false and empty without its step."""
    if inference is None or inference.output is None:
        return {"INFERENCE": False, "INFERENCE_INPUTS": "", "INFERENCE_SHAPE": ""}
    n_inputs = len(inference.inputs)
    return {
        "INFERENCE": True,
        "INFERENCE_INPUTS": "input" if n_inputs == 1 else f"{n_inputs} inputs",
        "INFERENCE_SHAPE": str(list(inference.output.shape)),
    }


def _sketch_values(deployment: Deployment) -> Iterator[tuple[str, str]]:
    """Yield (word, C code) of an Arduino sketch: input arrays, then loops that fill them."""
    inputs = [(k, tensor, tensor.elements) for k, tensor in enumerate(deployment.step.inputs)]
    yield (
        "ARRAYS",
        "\n".join(f"static {tensor.type.c_name} x{k}[{size}];" for k, tensor, size in inputs),
    )
    random_values = {
        DataType.REAL: "random(-1000, 1001) / 1000.0f",
        DataType.UINT8: "random(256)",
        DataType.INT8: "random(-128, 128)",
    }
    yield (
        "FILL",
        "\n".join(
            f"    for (int k = 0; k < {size}; k++) x{k}[k] = {random_values.get(tensor.type, '0')};"
            for k, tensor, size in inputs
        ),
    )


def format_command(command: str) -> str:
    """Format the command that exported a folder as a Markdown code block of Python or shell."""
    language = "python" if command.startswith("import ") else "sh"
    return f"```{language}\n{command}\n```"
