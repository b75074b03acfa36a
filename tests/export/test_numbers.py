"""Inputs that are not finite: all functions refuse them, without changes."""

import re
from itertools import product
from pathlib import Path

import pytest

from kit.digits import STEP, add_evaluation, freeze_front
from kit.nor_flash import C
from kit.programs import require_programs, run_command
from kit.rotation import mark_seeds_except
from kit.shared_objects import link_program
from poetmodel.export.exporting import export_step
from poetmodel.export.kernels import apply_prefix
from poetmodel.lowered.io import load_step
from poetmodel.lowered.ranges import number_check_instructions

PROGRAM = Path(__file__).with_name("library") / "numbers.c"
ALL = {"commit": True, "evaluate": True, "replay": 4}
WAYS = {
    "paged": {"ram": "90%", "device": "nrf52840", **ALL},
    "mapped": {"ram": "90%", "device": "nano33ble", **ALL},
    "prefix": {"ram": "150%", "prefix": "kws", **ALL},
    "no commits": {"ram": "150%", "evaluate": True, "replay": 4},
    "no samples": {"ram": "101%", "paging": False},
}


def float_step():
    """Return a step with a frozen front, and an evaluation."""
    return add_evaluation(freeze_front(load_step(STEP)))


def int8_step(train):
    """Return a step whose int8 layers train, with inference and evaluation."""
    import torch
    from torch import nn

    import poetmodel.torch as pmt
    from poetmodel.torch.lowering.inference import with_evaluation, with_inference
    from poetmodel.torch.lowering.step import lower

    torch.manual_seed(0)
    images = torch.randn(2, 3, 8, 8)
    layers = (nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, 2), nn.ReLU(), nn.Flatten())
    model = nn.Sequential(*layers, nn.Linear(16, 3)).eval()
    model = pmt.quantized(model, [images], train=train)
    given = (model, nn.functional.cross_entropy, (images, torch.tensor([0, 2])))
    step = lower(*given, optimizer=pmt.QuantizedSGD(model, lr=0.1))
    return with_inference(with_evaluation(step, *given), *given)


def refuse(step, folder, *flags, **options):
    """Export a step, and return the output of the program for such inputs."""
    require_programs("cc")
    export_step(step, folder, gap=0.5, infer=step.inference is not None, **options)
    prefix = options.get("prefix", "pm")
    program = folder / "numbers.c"
    program.write_text(apply_prefix(PROGRAM.read_text(encoding="utf-8"), prefix), encoding="utf-8")
    sources = [*sorted(folder.glob("src/*.c")), program]
    includes = (folder / "include", folder)
    return run_command([link_program([*C, *flags], sources, includes, folder / "numbers")], folder)


@pytest.mark.parametrize(
    ("way", "flags"),
    mark_seeds_except(
        [*((way, ()) for way in WAYS), ("paged", ("-DPM_REAL=double",)), ("mapped", ("-Ofast",))],
        {("mapped", ())},
        {("prefix", ())},
    ),
)
def test_float_steps_refuse_them(tmp_path, way, flags):
    """Step, slices, evaluation, samples that are stored or not, and the loss of the best state."""
    assert refuse(float_step(), tmp_path / "made", *flags, **WAYS[way]) == "refused\n"


@pytest.mark.torch
@pytest.mark.large
@pytest.mark.parametrize(
    ("train", "way"),
    mark_seeds_except(
        [*product(("last-1",), WAYS), ("all", "no samples")],
        {("last-1", "paged"), ("all", "no samples")},
    ),
)
def test_int8_steps_refuse_them(tmp_path, train, way):
    """An int8 level cannot be NaN: without the check, the zero point would replace it."""
    pytest.importorskip("torchao")
    assert refuse(int8_step(train), tmp_path / "made", **WAYS[way]) == "refused\n"


def test_cost_is_that_of_the_loop_on_a_board(tmp_path):
    """The table has the instructions of an element; the manifest those of all inputs."""
    require_programs("arm-none-eabi-gcc", "arm-none-eabi-objdump")
    export_step(load_step(STEP), tmp_path, gap=0.5, ram="100%", paging=False)
    board = ("-mcpu=cortex-m4", "-mthumb", "-mfloat-abi=hard", "-mfpu=fpv4-sp-d16")
    command = ["arm-none-eabi-gcc", *board, "-std=c11", "-O2", "-Iinclude", "-Isrc", "-c"]
    run_command([*command, "src/pm_finite.c", "-o", "finite.o"], tmp_path)
    listing = run_command(["arm-none-eabi-objdump", "-d", "finite.o"], tmp_path)
    loops = [
        (int(begin, 16), int(end, 16))
        for end, begin in re.findall(r"^ *([0-9a-f]+):.*\tb[a-z.]+\t([0-9a-f]+) <", listing, re.M)
        if int(begin, 16) < int(end, 16)
    ]
    ((begin, end),) = loops
    addresses = (int(at, 16) for at in re.findall(r"^ *([0-9a-f]+):\t", listing, re.M))
    loop = sum(begin <= at <= end for at in addresses)
    assert number_check_instructions(load_step(STEP)) == loop * 576 + 11
