"""`compile`: three lines, and errors in words."""

import copy
import io
import pickle
import re

import pytest
import torch

import poetmodel.torch as pmt
from kit.commands import Terminal
from kit.eager_steps import compile_keep_all, find_differences
from kit.networks import residual_step
from kit.traced_models import row_step
from poetmodel.errors import BudgetError, InputError, NoScheduleError
from poetmodel.torch.step.scheduled import (
    keep_all_bytes,
    min_budget_bytes,
)

nn = torch.nn


def simple(**options):
    """Return a step of two linear layers, and it compiled to keep everything."""
    torch.manual_seed(1)
    own = row_step(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    return own, compile_keep_all(*own, **options)


@pytest.fixture(scope="module")
def kept():
    """Return the results of `simple`; tests leave both unchanged."""
    return simple()


@pytest.fixture(scope="module")
def retracing():
    """Return the results of `simple` with ``dynamic="retrace"``; tests leave both unchanged."""
    return simple(dynamic="retrace")


def test_three_lines(tmp_path):
    """Measured, solved, planned, run: within the budget, and eager's results."""
    model, loss_fn, (x, y) = residual_step(size=16)
    step = pmt.compile(model, loss_fn, (x, y), ram="60%", storage=tmp_path / "scratch")
    assert find_differences(step, model, loss_fn, (x, y)) == []
    compiled = step.compiled
    assert compiled.budget_bytes == int(0.6 * compiled.keep_all_bytes)
    assert compiled.peak_bytes <= step.budget_bytes
    assert compiled.check.valid
    assert step.result.schedule is not None
    assert any("page times: measured" in note for note in compiled.notes)
    assert step.source.startswith("def step(")
    step.close()
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.slow
def test_recomputing_alone_needs_no_storage():
    """Without a folder, tensors are recomputed, and nothing is written."""
    own = residual_step(size=16)
    step = pmt.compile(*own, ram="80%", device="rpi4b")
    assert find_differences(step, *own) == []
    assert not step.result.problem.paging
    assert step.compiled.runner.page_file is None
    assert step.compiled.check.written_bytes == 0
    computed = [index for op, index in step.plan.program if op == "compute"]
    assert len(computed) > len(set(computed))


def test_the_state_dict_and_mode_are_the_users(kept):
    """No key is added or removed; evaluation runs as before, and training continues after it.

    With enough RAM, no tensor is recomputed or paged, small or large. A step cannot be copied.
    """
    own, step = kept
    assert step.compiled.peak_bytes == step.budget_bytes
    assert len(step.plan.program) > 0
    assert step.result.overhead_j == 0
    words = r"'Sequential', .*B of .*B planned, .*% more energy, loss = step\(\*inputs\)"
    assert re.fullmatch(rf"Step\({words}\)", repr(step))
    for copied in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="compile a step of the copy"):
            copied(step)
    model, _, inputs = own
    keys = list(model.state_dict())
    step(*inputs)
    assert list(model.state_dict()) == keys
    model.eval()
    with torch.no_grad():
        assert model(inputs[0]).shape == (3, 4)
    with pytest.raises(pmt.CaptureError, match="training mode"):
        step(*inputs)
    model.train()
    assert find_differences(step, *own) == []


def test_gradients_that_accumulate_are_of_a_part_of_the_loss_that_is_returned():
    """With accumulate=2 the loss is that of eager, and the gradients are of half of it."""
    model, batch = nn.Linear(4, 3), (torch.randn(8, 4), torch.randint(0, 3, (8,)))
    loss_fn = nn.functional.cross_entropy
    step = pmt.compile(model, loss_fn, batch, ram="100%", accumulate=2, cache=False)
    returned = step(*batch)
    found = model.weight.grad.clone()
    model.zero_grad()
    loss = loss_fn(model(batch[0]), batch[1])
    (loss / 2).backward()
    assert torch.equal(returned, loss.detach())
    assert torch.equal(found, model.weight.grad)


def test_other_inputs_are_compiled_for_if_asked(retracing):
    """With retrace each form is compiled once."""
    own, step = retracing
    step(*own[2])
    model, loss_fn, (x, y) = own
    first = step.compiled
    assert find_differences(step, model, loss_fn, (x[:2], y[:2])) == []
    second = step.compiled
    assert second is not first
    assert find_differences(step, *own) == []
    assert step.compiled is first
    model.eval()
    assert find_differences(step, *own) == []
    assert step.compiled not in (first, second)
    model.train()
    step(x[:2], y[:2])
    assert step.compiled is second


@pytest.mark.slow
def test_a_percentage_is_the_same_bytes_for_all_inputs():
    """The last, smaller batch of an epoch has the RAM of the others; a larger one has no more."""
    model, loss_fn, (x, y) = residual_step(size=16)
    step = pmt.compile(model, loss_fn, (x, y), ram="90%", device="rpi4b", dynamic="retrace")
    budget, whole = step.budget_bytes, step.compiled.keep_all_bytes
    assert find_differences(step, model, loss_fn, (x[:1], y[:1])) == []
    assert step.compiled.keep_all_bytes < whole
    assert step.budget_bytes == budget
    with pytest.raises((InputError, NoScheduleError), match="ram"):
        step(torch.cat((x, x)), torch.cat((y, y)))
    step(x, y)
    assert step.budget_bytes == budget == int(0.9 * whole)


def test_time_is_minimized_where_costs_are_those_of_this_host():
    """Time is minimized for measured costs, energy for those of a device; the report states it."""
    own = row_step(nn.Linear(4, 4))
    for options, aim in (
        ({}, "time"),
        ({"device": "rpi4b"}, "energy"),
        ({"minimize": "energy"}, "energy"),
        ({"minimize": "writes", "device": "rpi4b"}, "writes"),
    ):
        step = pmt.compile(*own, ram="100%", **options)
        assert step.result.problem.minimize == aim
        assert f"minimized: {aim}" in step.report()["costs"]
        assert f"% more {aim}, " in repr(step) or aim == "writes"


def test_costs_are_measured_with_the_threads_that_run():
    """The number of PyTorch's threads is used, and in profile, certificate and summary."""
    before = torch.get_num_threads()
    own = row_step(nn.Linear(4, 4))
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            step = pmt.compile(*own, ram="100%")
            assert any(f"{threads} thread(s)" in note for note in step.compiled.notes)
            found = step.verify()
            assert found.threads == step.report()["certificate"]["threads"] == threads
            assert f", {threads} thread(s)" in found.summary()
            assert pmt.measure(step.compiled.trace, repeats=1).threads == threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *(
            ({"ram": "100%", "accumulate": count}, "accumulate: expected 1 or more steps")
            for count in (0, -1, 2.0, True, "2")
        ),
        ({"ram": "100%", "steps": 0}, "steps: expected 1 or more steps"),
        ({"ram": "100%", "dynamic": "maybe"}, "dynamic: expected error or retrace"),
        ({"ram": "100%", "paging": True}, "paging: needs a folder"),
        ({"ram": "many", "device": "rpi4b"}, "ram: expected"),
        ({"ram": "100%", "storage": "file"}, "no file can be created"),
        ({"ram": "100%", "storage": "file/below"}, "no file can be created"),
        ({"ram": "100%", "storage": 5}, "storage: expected a folder, got 5"),
        ({"ram": "100%", "storage": ""}, "storage: .*got ''"),
        ({"ram": "100%", "device": 5}, "device: expected a device or its name, got 5"),
        ({"ram": "100%", "device": "cuda:0"}, "device: 'cuda:0' is a device of PyTorch"),
        ({"ram": "100%", "rollback": "no"}, "rollback: expected True or False, got 'no'"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, words, tmp_path):
    """Each with a sentence; a folder that cannot be made too."""
    (tmp_path / "file").touch()
    if options.get("storage") in ("file", "file/below"):
        options = {**options, "storage": tmp_path / options["storage"]}
    with pytest.raises(InputError, match=words):
        pmt.compile(*row_step(nn.Linear(4, 4)), **options)


def narrow_step():
    """Return a step of a residual network of one width."""
    return residual_step(widths=(8,))


def chain_step():
    """Return a step of wide rows, in which each layer can be computed again."""
    layers = (layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.GELU()))
    return nn.Sequential(*layers), nn.functional.mse_loss, tuple(torch.randn(2, 64, 32))


@pytest.mark.parametrize(
    ("make", "ram", "kind"),
    [
        (narrow_step, 10_000, BudgetError),
        pytest.param(residual_step, "0%", BudgetError, marks=pytest.mark.slow),
        pytest.param(residual_step, "30%", NoScheduleError, marks=pytest.mark.slow),
        (chain_step, "30%", NoScheduleError),
    ],
)
def test_budgets_that_cannot_be_kept_are_told(make, ram, kind):
    """The error lists reserves and their reasons, and a budget that suffices, which is true."""
    own = make()
    with pytest.raises(kind, match=r"ram: .* is too little for Sequential: ") as caught:
        pmt.compile(*own, ram=ram, device="rpi4b")
    text = str(caught.value)
    assert "0 B tensors" not in text
    enough = re.search(r"(?:the minimum is )?ram=(\d+) \(([\d.]+)%\)", text)
    reserved = re.search(r"; ([\d,]+) B of it are reserved: (.*)$", text)
    parts = re.findall(r"([\d,]+) B [^+]+", reserved[2])
    assert sum(int(p.replace(",", "")) for p in parts) == int(reserved[1].replace(",", ""))
    traced = pmt.trace(*own)
    least, share = int(enough[1]), float(enough[2])
    assert min_budget_bytes(traced) <= least <= share / 100 * keep_all_bytes(traced)
    step = pmt.compile(*own, ram=least, device="rpi4b")
    assert step.compiled.peak_bytes <= least
    with pytest.raises(NoScheduleError, match=r"ram=.*is enough|the minimum is ram="):
        pmt.compile(*own, ram=least, recompute=False, device="rpi4b")


@pytest.mark.parametrize(
    ("mode", "words"),
    [(torch.no_grad, r"gradients are off \(torch\.no_grad"),
     (torch.inference_mode, "inference mode is on"),
     (lambda: torch.autocast("cpu"), "inside the model")],
)  # fmt: skip
def test_modes_around_captures_and_steps_are_refused(mode, words, retracing):
    """After the refusal, there are no gradients, and the step is unchanged."""
    own, step = retracing
    step(*own[2])
    own[0].zero_grad()
    other = (lambda: pmt.capture(*own)) if mode is torch.no_grad else lambda: step(*own[2])
    for work in (lambda: compile_keep_all(*own), other):
        with mode(), pytest.raises(pmt.CaptureError, match=words):
            work()
    assert all(parameter.grad is None for parameter in own[0].parameters())
    assert find_differences(step, *own) == []


@pytest.mark.parametrize(("stream", "is_terminal"), [(Terminal, True), (io.StringIO, False)])
def test_stages_are_shown_on_a_terminal_only(stream, is_terminal, monkeypatch):
    """Phases are shown in order; a pipe gets no output."""
    stderr = stream()
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    with pmt.compile(
        model, nn.functional.mse_loss, (torch.ones(4, 8), torch.ones(4, 1)), ram="100%"
    ):
        shown = stderr.getvalue()
    assert bool(shown) == is_terminal
    if is_terminal:
        assert "comparing with eager" in shown
