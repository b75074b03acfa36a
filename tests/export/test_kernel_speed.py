"""Instructions of kernels on an emulated Cortex-M4, which are the same at every run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

import poetmodel.export
from kit.programs import needs
from kit.small_networks import captured
from poetmodel.export.board import MACHINES, Target, execute
from poetmodel.export.kernels import prototypes
from poetmodel.export.measuring import emulated_profile

pytestmark = pytest.mark.slow

SOURCES: Final = Path(poetmodel.export.__file__).parent / "c"
MOST_PER_MAC: Final = 12
LAYERS: Final = {
    # channels, height, width of input and output; window; stride; padding; groups
    "ds-cnn first": ((1, 49, 10), (64, 25, 5), (10, 4), 2, (5, 1), 1),
    "ds-cnn depthwise": ((64, 25, 5), (64, 25, 5), (3, 3), 1, (1, 1), 64),
    "ds-cnn pointwise": ((64, 25, 5), (64, 25, 5), (1, 1), 1, (0, 0), 1),
    "resnet8 3x3": ((16, 32, 32), (16, 32, 32), (3, 3), 1, (1, 1), 1),
    "resnet8 3x3 by 2": ((16, 32, 32), (32, 16, 16), (3, 3), 2, (1, 1), 1),
    "resnet8 1x1 by 2": ((16, 32, 32), (32, 16, 16), (1, 1), 2, (0, 0), 1),
    "resnet8 last": ((64, 8, 8), (64, 8, 8), (3, 3), 1, (1, 1), 1),
    "mobilenet first": ((3, 96, 96), (8, 48, 48), (3, 3), 2, (1, 1), 1),
    "mobilenet depthwise": ((8, 48, 48), (8, 48, 48), (3, 3), 1, (1, 1), 8),
    "mobilenet depthwise by 2": ((16, 48, 48), (16, 24, 24), (3, 3), 2, (1, 1), 16),
    "mobilenet pointwise": ((128, 6, 6), (128, 6, 6), (1, 1), 1, (0, 0), 1),
    "mobilenet last depthwise": ((256, 3, 3), (256, 3, 3), (3, 3), 1, (1, 1), 256),
    "mobilenet last pointwise": ((256, 3, 3), (256, 3, 3), (1, 1), 1, (0, 0), 1),
    "lenet": ((6, 14, 14), (16, 10, 10), (5, 5), 1, (0, 0), 1),
    "lenet last": ((400, 1, 1), (120, 1, 1), (1, 1), 1, (0, 0), 1),
}
PRODUCTS: Final = {
    # rows, summed, columns; steps of rows of the result, rows and columns of both factors
    "autoencoder": (1, 640, 128, 128, 640, 1, 1, 640),
    "autoencoder, of its input": (1, 128, 640, 640, 128, 1, 640, 1),
    "autoencoder, of its weights": (128, 1, 640, 640, 1, 128, 640, 1),
    "bert": (16, 32, 32, 32, 32, 1, 1, 32),
    "bert, of its weights": (32, 16, 32, 32, 1, 32, 32, 1),
}

_MAIN: Final = """
#include "pm_kernels.h"
#include "pm_platform.h"
#include "pm_text.h"
static pm_real a[82000], b[82000], c[82000];

static void say(const char *name, uint32_t ticks)
{{
    char text[PM_TEXT_BYTES];
    pm_complain(name);
    pm_complain(pm_text_of_integer((uint64_t)ticks * PM_TICK, text));
    pm_complain("\\n");
}}

int main(int argc, char **argv)
{{
    uint32_t start;
    (void)argc, (void)argv;
    pm_start_clock();
{calls}
    return 0;
}}
"""


def cases() -> dict[str, tuple[str, str, int]]:
    """Return for each case its kernel, what it is called with, and multiplications."""
    found = {}
    for name, (x, y, window, stride, pad, groups) in LAYERS.items():
        shape = ", ".join(map(str, (*x, *y, *window, stride, stride, *pad, 1, 1, groups)))
        lists = f"(const int32_t[]){{{shape}}}, 1, 0, {y[0]}, {y[0] * y[1] * y[2]}"
        macs = x[0] // groups * y[0] * y[1] * y[2] * window[0] * window[1]
        kernel = "pm_depthwise" if groups > 1 else "pm_conv2d"
        found[name] = (kernel, f"b, a, c, 0, {lists}", macs)
        found[f"{name}, of its weights"] = (f"{kernel}_dw", f"c, a, b, {lists}", macs)
        if not name.endswith("first"):  # no gradient of what comes from outside
            found[f"{name}, of its input"] = (f"{kernel}_dx", f"a, b, c, {lists}, 0", macs)
    for name, sizes in PRODUCTS.items():
        m, k, n = sizes[:3]
        given = f"c, a, b, {', '.join(map(str, sizes))}, 0"
        found[f"product: {name}"] = ("pm_mm", given, m * k * n)
    return found


@pytest.fixture(scope="module")
def instructions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Return for each case instructions for each multiplication."""
    needs(Target.M4)
    folder = tmp_path_factory.mktemp("speed")
    kernels = {kernel: SOURCES / "kernels" / f"{kernel}.c" for kernel, _, _ in cases().values()}
    texts = {kernel: path.read_text(encoding="utf-8") for kernel, path in kernels.items()}
    (folder / "pm_kernels.h").write_text(prototypes(texts))
    calls = [
        f'    start = pm_ticks();\n    {kernel}({given});\n    say("{name}: ", pm_ticks() - start);'
        for name, (kernel, given, _) in cases().items()
    ]
    main = _MAIN.format(calls="\n".join(calls))
    (folder / "main.c").write_text(main)
    host = SOURCES / "host"
    board = [host / "board" / f"{name}.c" for name in ("board", "semihosting", "startup")]
    command = [
        *("arm-none-eabi-gcc", "-mcpu=cortex-m4", "-mthumb", "-mfloat-abi=hard"),
        *("-mfpu=fpv4-sp-d16", "-std=c11", "-O2", "-ffp-contract=off", "-ffunction-sections"),
        *(f"-I{SOURCES / part}" for part in ("src", "kernels", "host")),
        *("-I.", "main.c", host / "pm_text.c"),
        *(*board, *kernels.values(), "-nostartfiles", "--specs=nosys.specs"),
        *("-T", host / "board" / "mcu.ld", "-Wl,--defsym=RAM_SIZE=0x400000"),
        *("-Wl,--defsym=STACK_SIZE=8192", "-Wl,--gc-sections", "-lm", "-o", "speed.elf"),
    ]
    done = execute(command, folder, time_limit_s=120)
    assert done.returncode == 0, done.stderr
    emulated = ["qemu-system-arm", "-M", MACHINES[Target.M4], "-icount", "shift=0", "-nographic"]
    emulated += ["-monitor", "none", "-serial", "none", "-kernel", "speed.elf"]
    emulated += ["-semihosting-config", "enable=on,target=native"]
    done = execute(emulated, folder, time_limit_s=300)
    assert done.returncode == 0, done.stderr
    counts = re.findall(r"^(.+): (\d+)$", done.stderr, re.MULTILINE)
    return {name: int(count) / cases()[name][2] for name, count in counts}


@pytest.mark.parametrize("name", cases())
def test_kernels_are_quick(name: str, instructions: dict[str, float]) -> None:
    """Convolutions, their gradients and products take at most 12 instructions for each MAC."""
    assert instructions[name] <= MOST_PER_MAC


def test_most_kernels_are_quicker(instructions: dict[str, float]) -> None:
    """The median is below half of that."""
    assert len(instructions) == len(cases())
    assert sorted(instructions.values())[len(instructions) // 2] < MOST_PER_MAC / 2


@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("perceptron", 280_000),
        ("perceptron in batches", 1_200_000),
        ("lenet", 4_400_000),
        ("batch norms", 5_500_000),
    ],
)
def test_steps_are_quick(name: str, most: int) -> None:
    """All nodes of a step that is computed once take no more instructions than this."""
    needs(Target.M4)
    found = emulated_profile(captured(name), device="nrf52840")
    assert sum(found.instructions.values()) <= most
