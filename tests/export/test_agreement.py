"""Exported C holds against PyTorch: both compute in double, from the same weights and batches."""

import math
import re
import tempfile
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, reject, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from kit.export_agreement import (
    BATCH,
    OPTIMIZERS,
    SCHEDULES,
    Exported,
    Outcome,
    lower_training,
    make_batches_like,
    measure_condition,
    train_in_torch,
    train_in_torch_from,
    two_groups,
)
from kit.networks import trainings
from kit.programs import require_programs, run_command
from kit.rotation import mark_seeds_except
from kit.shared_objects import link_program
from mcu.networks import NETWORKS
from poetmodel.errors import NoScheduleError
from poetmodel.export.board import Target

LIBRARY = Path(__file__).with_name("library")
OTHERS = [name for name in SCHEDULES if name != "keep-all"]
STEPS = 3
CLOSE = 1e-12
"""How far results may be apart, over the largest of their kind."""
NOISE = 200
"""How many times what one rounding error of every parameter makes of PyTorch's results."""


def compare(name, optimizer, folder, **options):
    """Export a network, run steps, and return it with the largest differences from PyTorch.

    In PyTorch, each step begins with the state of the C after the step before: some networks
    multiply rounding errors in each step by a hundred. Differences are counted beyond those to
    which rounding errors grow in PyTorch itself, in that one step.
    """
    torch.manual_seed(0)
    training = NETWORKS[name](*BATCH.get(name, ()))
    batches = make_batches_like(training[2], 3)
    steps = 1 if optimizer == "gradients" else STEPS
    exported = Exported(lower_training(training, optimizer, name=name), folder, **options)
    held = [exported.outcome(batches, count) for count in range(1, steps + 1)]
    assert all(each.losses == held[-1].losses[: len(each.losses)] for each in held)
    expected = train_in_torch_from(training, batches, held, optimizer)
    rounded = train_in_torch_from(training, batches, held, optimizer, rounded=True)
    worst = {}
    for its, mine, noisy in zip(expected, held, rounded, strict=True):
        apart = Outcome(mine.losses[-1:], mine.tensors).differences(its)
        noise = noisy.differences(its)
        beyond = {kind: apart[kind] - NOISE * noise[kind] for kind in apart}
        assert not any(map(math.isnan, beyond.values())), (apart, noise)
        worst = {kind: max(x, worst.get(kind, x)) for kind, x in beyond.items()}
    return exported, worst


@pytest.mark.parametrize(
    ("optimizer", "schedule"),
    mark_seeds_except(
        product(
            ("momentum", "adam", "adagrad", "groups", "nadam", "rmsprop", "adamax", "radam"),
            ("keep-all", "mapped"),
        ),
        {("radam", "mapped")},
        {("adam", "keep-all"), ("nadam", "mapped")},
    ),
)
def test_state_is_that_of_torch(optimizer, schedule, tmp_path):
    """After each step parameters and moments are PyTorch's; updates of storage are in pieces."""
    exported, apart = compare("mlp", optimizer, tmp_path, **SCHEDULES[schedule])
    assert ("mapped" in {s["home"] for s in exported.manifest["states"]}) == (schedule == "mapped")
    assert max(apart.values()) <= CLOSE, apart


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "optimizer"),
    mark_seeds_except(
        [
            *product(NETWORKS, ("gradients", "sgd", "momentum", "adam")),
            *product(("mlp", "resnet8-thin"), ("adamw", "clipped", "groups")),
        ],
        {("lenet", "gradients"), ("bert-block", "gradients"), ("mlp", "clipped"), ("mlp", "adamw")},
    ),
)
def test_networks_train_as_torch(name, optimizer, tmp_path):
    """Loss and gradients are PyTorch's in every network, and state with every optimizer."""
    _, apart = compare(name, optimizer, tmp_path)
    assert max(apart.values()) <= CLOSE, apart


@pytest.mark.parametrize("factor", [pytest.param(1.0, marks=pytest.mark.slow), 0.25])
def test_rates_of_all_groups_follow_that_of_the_first(factor, tmp_path, monkeypatch):
    """Called with a part of the rate of the export, each group has that part of its own."""
    torch.manual_seed(0)
    training = NETWORKS["mlp"]()
    batches = make_batches_like(training[2], 3)
    exported = Exported(lower_training(training, "groups"), tmp_path)
    assert exported.manifest["learning_rate"] == 0.02
    exported.manifest["learning_rate"] *= factor
    monkeypatch.setitem(OPTIMIZERS, "groups", (partial(two_groups, factor=factor), None))
    expected = train_in_torch(training, batches, STEPS, "groups")
    apart = exported.outcome(batches, STEPS).differences(expected)
    assert max(apart.values()) <= CLOSE, apart
    comment = (tmp_path / "include/pm.h").read_text().split("int pm_step(")[0]
    assert "first group" in comment


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [*OTHERS, "commits"])
@pytest.mark.parametrize("name", mark_seeds_except(("bert-block", "resnet8-thin"), ("bert-block",)))
def test_schedules_train_as_torch(name, schedule, tmp_path):
    """So they do where tensors are computed again or paged, and state is on storage."""
    # Moments would take so much of the RAM that there is nothing to compute again.
    optimizer = "sgd" if schedule == "recomputed" else "adam"
    options = SCHEDULES.get(schedule, {"share": 0.3, "commit": True})
    exported, apart = compare(name, optimizer, tmp_path, **options)
    ops, manifest = exported.ops, exported.manifest
    homes = {each["home"] for each in manifest["states"]}
    assert {
        "recomputed": ops["again"] > 0 == ops["page_in"],
        "blocking": ops["page_out"] > 0 == ops["wait"] and "storage" in homes,
        "dma": ops["wait"] > 0 and "storage" in homes,
        "mapped": "mapped" in homes,
        "tiles": manifest["tile_bytes"] == 4096,
        "commits": manifest["commit"],
    }[schedule], (ops, homes)
    assert max(apart.values()) <= CLOSE, apart


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "optimizer"),
    mark_seeds_except(
        product((Target.HOST, Target.HOST_DOUBLE), ("sgd", "momentum", "adam")),
        {(Target.HOST_DOUBLE, "adam")},
    ),
)
def test_training_goes_on_after_a_reset_as_if_there_were_none(target, optimizer, tmp_path):
    """After `pm_resume`, masks of dropout continue, also with constants of double builds."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.5), nn.Linear(32, 4))
    training = (module, functional.mse_loss, (torch.randn(8, 6), torch.randn(8, 4)))
    batches = make_batches_like(training[2], 4)
    exported = Exported(lower_training(training, optimizer), tmp_path, share=0.5, commit=True)
    whole = exported.run(batches, 4, target=target)
    exported.run(batches, 2, target=target)
    rest = exported.run(batches, 2, target=target, words=("resume",))
    assert [whole.losses[k] for k in (3, 4)] == [rest.losses[k] for k in (3, 4)]
    assert whole.state == rest.state


# -- random networks -------------------------------------------------------------------------------
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
"""No search for a smaller failure, of which each try is a build."""


@pytest.mark.slow
@pytest.mark.parametrize("examples", mark_seeds_except((3, 10, 11), (3,)))
def test_random_networks_train_as_in_torch(examples):
    """Losses, gradients and state of random networks are PyTorch's, in double."""

    @settings(max_examples=examples, phases=PHASES)
    @given(
        training=trainings(),
        optimizer=st.sampled_from(sorted(OPTIMIZERS)),
        share=st.sampled_from((0.0, 0.1, 0.3, 1.0)),
        device=st.sampled_from(("nrf52840", "stm32h743", "nano33ble")),
    )
    def check(training, optimizer, share, device):
        batches = make_batches_like(training[2], 2)
        steps = 1 if optimizer == "gradients" else 3
        with tempfile.TemporaryDirectory() as folder:
            step = lower_training(training, optimizer)
            try:
                exported = Exported(step, Path(folder), share=share, device=device, time_limit=20)
            except NoScheduleError:
                reject()  # no addresses were found that fit: there is nothing to compare
            found = exported.outcome(batches, steps)
        apart = found.differences(train_in_torch(training, batches, steps, optimizer))
        assert max(apart.values()) <= 1e-11, apart

    check()


# -- on emulated boards: bits, tolerances, and transfers that are late -----------------------------
def prepared(name, optimizer, *batch):
    """Return a network, its step and batches."""
    torch.manual_seed(0)
    training = NETWORKS[name](*batch)
    return (
        training,
        lower_training(training, optimizer, name=name),
        make_batches_like(training[2], 2),
    )


def on_board(name, optimizer, folder, target=Target.M4, **options):
    """Export a network, run three steps on a board, and return the results."""
    _, step, batches = prepared(name, optimizer)
    exported = Exported(step, folder, **options)
    return exported.outcome(batches, 3, target=target, settings=("POISON=1",))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "optimizer", "schedule"),
    mark_seeds_except(
        [
            *product(("bert-block",), ("momentum",), ("blocking", "mapped")),
            *product(("resnet8-thin", "ds-cnn"), ("sgd",), ("blocking", "mapped")),
            *product(("unet",), ("adam",), OTHERS),
            *product(("resnet8-thin", "ds-cnn", "lenet"), ("momentum",), ("tiles",)),
        ],
        {("bert-block", "momentum", "mapped"), ("resnet8-thin", "momentum", "tiles")},
    ),
)
def test_schedules_give_the_bits_of_keep_all(name, optimizer, schedule, tmp_path):
    """Computed again, paged, in tiles, read in place: losses and state are the same bits."""
    kept = on_board(name, optimizer, tmp_path / "keep-all")
    assert on_board(name, optimizer, tmp_path / schedule, **SCHEDULES[schedule]).has_same_bits(kept)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "target"),
    mark_seeds_except(
        product(("bert-block", "resnet8-thin", "m5"), (Target.M3, Target.M7)),
        {("bert-block", Target.M3)},
    ),
)
def test_boards_give_the_same_bits(name, target, tmp_path):
    """Soft floats of an M3 and those of an M7 are those of an M4.

    The C library of cores with floating-point units fuses products and sums in ``expf`` and
    ``erff``, which attention and GELU need: there a core without one is close, not the same.
    """
    found = [
        on_board(name, "adam", tmp_path / each, each, share=0.3) for each in (Target.M4, target)
    ]
    if name == "bert-block" and target is Target.M3:
        assert max(found[0].differences(found[1]).values()) < 1e-5
    else:
        assert found[0].has_same_bits(found[1])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("lenet", marks=pytest.mark.slow),
        pytest.param("bert-block", marks=pytest.mark.slow),
        *mark_seeds_except(("resnet8", "ds-cnn", "autoencoder", "unet", "m5", "vit-block"), ()),
    ],
)
def test_floats_are_near_torch(name, tmp_path):
    """In float, loss and gradients are within 1e-5, or within the error that the problem permits.

    That is the change of PyTorch's results in double if parameters are rounded.
    """
    training, step, batches = prepared(name, "gradients", *BATCH.get(name, ()))
    found = Exported(step, tmp_path, share=0.5).outcome(batches, 1, target=Target.M4)
    apart = found.differences(train_in_torch(training, batches, 1))
    moved = measure_condition(training, batches)
    assert all(apart[kind] <= 1e-5 + 3 * moved[kind] for kind in apart), (apart, moved)


@pytest.fixture(scope="module")
def paged(tmp_path_factory):
    """Return a perceptron whose state is on storage, by DMA, and its batches."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(12, 24), torch.nn.Tanh(), torch.nn.Linear(24, 16), torch.nn.Tanh(),
        torch.nn.Linear(16, 4),
    )  # fmt: skip
    inputs = (torch.randn(3, 12), torch.randint(0, 4, (3,)))
    training = (model, torch.nn.functional.cross_entropy, inputs)
    folder = tmp_path_factory.mktemp("paged")
    step = lower_training(training, "momentum", name="perceptron")
    return Exported(step, folder, **SCHEDULES["dma"]), make_batches_like(inputs, 2)


def test_missing_waits_are_noticed(paged):
    """Without its waits, a step on the late driver fails, or computes from missing data."""
    exported, batches = paged
    source = exported.folder / "src" / "pm_step.c"
    text = source.read_text(encoding="utf-8")
    # Waits after an error, which are marked by a cast, are not executed here.
    lines = [
        line for line in text.splitlines() if not re.search(r"(?<!\(void\))pm_page_wait", line)
    ]
    assert len(lines) < len(text.splitlines())
    try:
        source.write_text("\n".join(lines) + "\n", encoding="utf-8")
        found = exported.run(batches, 2, target=Target.HOST, settings=("LATE=1", "POISON=1"))
    finally:
        source.write_text(text, encoding="utf-8")
    assert found.status != 0 or not np.isfinite(list(found.losses.values())).all()


@pytest.mark.parametrize("kind", ["fail", "short"])
def test_a_step_that_fails_during_transfers_may_be_done_again(paged, tmp_path, kind):
    """Whichever transfer fails, the step waits for the others: no slot is busy in the next one."""
    folder = paged[0].folder
    require_programs(Target.HOST)
    drivers = ("port/driver_ram.c", "host/driver_faults.c", "host/driver_late.c")
    parts = [*sorted(folder.glob("src/*.c")), *(folder / driver for driver in drivers)]
    wraps = [f"-Wl,--wrap=pm_page_{name}" for name in ("out", "in", "wait")]
    command = ("cc", "-std=c11", "-O0", "-ffp-contract=off", "-DPM_FAULTS")
    files, includes = (*parts, LIBRARY / "retry.c"), (folder, folder / "include")
    app = link_program(command, files, includes, tmp_path / "app", *wraps)
    torn, before = map(int, re.findall(r"\d+", run_command([app, kind], tmp_path)))
    assert torn > 0
    assert before > 0
