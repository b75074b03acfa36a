"""Gradients summed over several batches before an update: as PyTorch's loop, and through resets."""

import copy
import subprocess

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import poetmodel.torch as pmt
from kit.export_agreement import SCHEDULES, Exported, make_batches_like
from kit.nor_flash import build_over_nor
from kit.programs import require_programs
from kit.rotation import mark_seeds_except
from poetmodel.errors import InputError
from poetmodel.export.board import Target
from poetmodel.lowered.io import load_step, save_step
from poetmodel.torch.lowering.step import lower

COUNT = "accumulated_batches"
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-3),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, eps=1e-3),
}


def training(*, norms=True):
    """Return a model, its loss, and inputs."""
    torch.manual_seed(0)
    norm = [nn.BatchNorm1d(8)] if norms else []
    model = nn.Sequential(nn.Linear(6, 8), *norm, nn.Tanh(), nn.Linear(8, 4))
    return model, functional.mse_loss, (torch.randn(5, 6), torch.randn(5, 4))


def exported(folder, name, batches, *, clip=None, norms=True, **options):
    """Return a step that sums gradients of so many batches, as a folder."""
    model, loss_fn, inputs = training(norms=norms)
    step = lower(
        model, loss_fn, inputs, optimizer=OPTIMIZERS[name](model.parameters()),
        clip_grad_norm=clip, accumulate=batches,
    )  # fmt: skip
    return Exported(step, folder, **options)


def looped(given, name, every, steps, batches, *, clip=None):
    """Train as users of PyTorch do, in the type of the batches; return losses and state."""
    model, loss_fn, _ = given
    model = copy.deepcopy(model).to(every[0][0].dtype)
    optimizer, losses = OPTIMIZERS[name](model.parameters()), []
    for k in range(steps):
        x, y = every[k % len(every)]
        loss = loss_fn(model(x), y)
        losses.append(loss.item())
        (loss / batches).backward()
        if (k + 1) % batches == 0:
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return losses, model, optimizer


def apart(found, losses, model, optimizer):
    """Return the largest difference of losses, parameters, sums of gradients, and moments."""
    expected = {name: value.detach() for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        expected[f"{name}.grad"] = gradient
        moments = optimizer.state.get(parameter, {}).items()
        expected |= {f"{name}.{key}": value for key, value in moments if value is not None}
    assert expected.keys() <= found.tensors.keys() - {COUNT}
    pairs = [(found.tensors[name], value.numpy()) for name, value in expected.items()]
    pairs.append((np.array(found.losses), np.array(losses)))
    return max(float(np.abs(mine - its).max(initial=0.0)) for mine, its in pairs)


CASES = {
    "all kept": ("sgd", {}),
    "momentum": ("momentum", {}),
    "clipped": ("rmsprop", {"clip": 0.1}),
    "in tiles": ("adam", {"tile": 64, "ram": "90%", "norms": False}),
    "on storage": ("adam", {"share": 0.2}),
    "on storage that is read like RAM": ("adam", SCHEDULES["mapped"]),
    "clipped on such storage": ("sgd", {**SCHEDULES["mapped"], "clip": 0.1}),
    "with commits": ("momentum", {"share": 0.2, "commit": True}),
    "with commits on such storage": ("adam", {**SCHEDULES["mapped"], "commit": True}),
    "with commits on such storage, weights in RAM": (
        "sgd",
        {**SCHEDULES["mapped"], "commit": True, "share": 0.15},
    ),
}
LONG = {"all kept", "clipped", "on storage", "with commits", "with commits on such storage"}


@pytest.mark.parametrize(
    "case",
    mark_seeds_except(
        CASES,
        {*CASES}
        - {*LONG, "momentum", "on storage that is read like RAM", "clipped on such storage"},
        LONG,
    ),
)
def test_sums_are_those_of_the_loop_of_pytorch(case, tmp_path):
    """After each batch all is as after it in the loop: three batches are an update."""
    name, options = CASES[case]
    program = exported(tmp_path, name, 3, **options)
    assert program.manifest["accumulate"] == 3
    given = training(norms=options.get("norms", True))
    every, clip = make_batches_like(given[2], 4), options.get("clip")
    for steps in (2, 3, 4, 7):
        found = program.outcome(every, steps)
        assert found.tensors[COUNT] == steps % 3
        assert apart(found, *looped(given, name, every, steps, 3, clip=clip)) < 1e-12, steps


@pytest.mark.slow
@pytest.mark.parametrize("clip", mark_seeds_except([None, 0.1], [0.1]))
def test_sums_on_flash_that_is_read_where_it_lies(clip, tmp_path):
    """No sum is read from a block after that was erased; the bits are those of a step in RAM."""
    require_programs(Target.HOST)
    given = training(norms=False)
    every = [tuple(x.float() for x in batch) for batch in make_batches_like(given[2], 4)]
    options = {"clip": clip, "norms": False}
    flash = {**SCHEDULES["mapped"], "commit": True, "share": 0.0}
    program = exported(tmp_path / "flash", "adam", 2, **options, **flash)
    homes = {state["name"]: state["home"] for state in program.manifest["states"]}
    assert homes["0.weight.grad"] == "mapped"
    found = build_over_nor(program.folder, "flash_area", tmp_path / "app")
    whole = exported(tmp_path / "ram", "adam", 2, **options).run(every, 5, target=Target.HOST)
    (program.folder / "inputs.bin").write_bytes((tmp_path / "ram" / "inputs.bin").read_bytes())
    rate = repr(program.manifest["learning_rate"])
    command = [found, "5", rate, "inputs.bin", "state.bin"]
    subprocess.run(command, cwd=program.folder, check=True)
    assert (program.folder / "state.bin").read_bytes() == whole.state


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a program, its batches, and the outcome of seven of them."""
    program = exported(tmp_path_factory.mktemp("whole"), "adam", 3, share=0.2, commit=True)
    every = make_batches_like(training()[2], 8)
    return program, every, program.run(every, 7, target=Target.HOST)


@pytest.mark.parametrize("before", [1, 2, 3, 4])
def test_training_goes_on_in_the_middle_of_a_sum(before, whole):
    """After a reset, and from a file of state, it has the bits of one that went on."""
    program, every, whole = whole
    options = {"target": Target.HOST}
    first = program.run(every, before, **options).require_success()
    rest = program.run(every, 7 - before, words=("resume",), **options)
    (program.folder / "first.bin").write_bytes(first.state)
    again = program.run(every[before:], 7 - before, words=("state=first.bin",), **options)
    assert whole.state == rest.state == again.state
    assert [*first.losses.values(), *rest.losses.values()] == [*whole.losses.values()]


def test_a_model_has_the_sums_as_its_gradients(tmp_path):
    """PyTorch continues with the missing batches; a file that it saves begins with none."""
    program, given = exported(tmp_path, "adam", 3), training()
    every = [tuple(x.float() for x in batch) for batch in make_batches_like(given[2], 8)]
    state = program.run(every, 5, target=Target.HOST).require_success().state
    (tmp_path / "state.bin").write_bytes(state)
    model, loss_fn, _ = training()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    pmt.load_state(tmp_path, model, optimizer=optimizer)
    (loss_fn(model(every[5][0]), every[5][1]) / 3).backward()
    optimizer.step()
    _, other, _ = looped(given, "adam", every, 6, 3)
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)
    pmt.save_state(model, tmp_path, optimizer=optimizer)
    optimizer.zero_grad()
    pmt.load_state(tmp_path, model, optimizer=optimizer)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_step_files_have_what_depends_on_the_count(tmp_path):
    """A step that is read equals the written one; files that cannot be valid are refused."""
    model, loss_fn, inputs = training()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    step = lower(model, loss_fn, inputs, optimizer=optimizer, accumulate=3)
    save_step(step, tmp_path / "a.step.json")
    read = load_step(tmp_path / "a.step.json")
    assert (read.calls, read.accumulate) == (step.calls, 3)
    text = (tmp_path / "a.step.json").read_text(encoding="utf-8")
    other = text.replace(f'"counter": {{"buffer": "{COUNT}"', '"counter": {"buffer": "0.bias"')
    (tmp_path / "b.step.json").write_text(other, encoding="utf-8")
    with pytest.raises(InputError, match=r"where: '0\.bias' is not read by its node"):
        load_step(tmp_path / "b.step.json")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"accumulate": 0}, "accumulate: expected a number of batches from 1, got 0"),
        ({"accumulate": 2.0}, r"from 1, got 2\.0"),
        ({"accumulate": 2}, "needs an optimizer; pass one"),
    ],
)
def test_what_cannot_be_summed(given, message, tmp_path):
    """The error states the expected values."""
    model, loss_fn, inputs = training()
    with pytest.raises(InputError, match=message):
        pmt.export(model, loss_fn, inputs, folder=tmp_path / "firmware", **given)
