"""`compile`: three lines, and what is wrong in words."""

from __future__ import annotations

import copy
import io
import pickle
import re
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

import poetmodel.torch as pmt  # noqa: E402
from kit.commands import Terminal  # noqa: E402
from kit.eager_steps import differing, keep_all  # noqa: E402
from kit.networks import residual_step  # noqa: E402
from kit.traced_models import rows  # noqa: E402
from poetmodel.device import Costs, Device  # noqa: E402
from poetmodel.errors import BudgetError, InputError, NoScheduleError  # noqa: E402
from poetmodel.torch.step.trace import (  # noqa: E402
    coarsened,
    floor_bytes,
    keep_all_bytes,
    least_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

nn = torch.nn
pytestmark = pytest.mark.torch


def simple(**options: Any) -> tuple[Any, pmt.Step]:
    """Return a step of two linear layers, and it compiled to keep everything."""
    torch.manual_seed(1)
    own = rows(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    return own, keep_all(*own, **options)


@pytest.fixture(scope="module")
def kept() -> tuple[Any, pmt.Step]:
    """Return what `simple` does; tests leave both as they were."""
    return simple()


def test_three_lines(tmp_path: Path) -> None:
    """Measured, solved, planned, run: within the budget, and eager's results."""
    torch.manual_seed(1)
    model, loss_fn, (x, y) = residual_step(size=16)
    step = pmt.compile(model, loss_fn, (x, y), ram="60%", storage=tmp_path / "scratch")
    assert differing(step, model, loss_fn, (x, y)) == []
    compiled = step.compiled
    assert compiled.budget_bytes == int(0.6 * compiled.keep_all_bytes)
    assert compiled.peak_bytes <= step.budget_bytes
    assert compiled.check.valid
    assert step.result.schedule is not None
    assert any("page times: measured" in note for note in compiled.notes)
    assert step.source.startswith("def step(")
    step.close()
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_step_tells_what_it_is() -> None:
    """In one line: its name, what it takes of its budget, what it costs, how it is called."""
    for minimize in ("energy", "time"):
        step = keep_all(*rows(nn.Linear(4, 4)), minimize=minimize)
        words = rf"'Sequential', .*B of .*B planned, .*% more {minimize}, loss = step\(\*inputs\)"
        assert re.fullmatch(rf"Step\({words}\)", repr(step))
        step.close()


def test_recomputing_alone_needs_no_storage() -> None:
    """Without a folder tensors are recomputed, and nothing is written."""
    torch.manual_seed(1)
    own = residual_step(size=16)
    step = pmt.compile(*own, ram="80%", device="rpi4b")
    assert differing(step, *own) == []
    assert not step.result.problem.paging
    assert step.compiled.runner.file is None
    assert step.compiled.check.written_bytes == 0
    computed = [index for op, index in step.plan.program if op == "compute"]
    assert len(computed) > len(set(computed))


def test_everything_is_kept_where_there_is_room(kept: tuple[Any, pmt.Step]) -> None:
    """100 % recomputes and pages nothing, whatever is small or large."""
    _, step = kept
    assert step.compiled.coarse.threshold_bytes == 0
    assert step.compiled.peak_bytes == step.budget_bytes
    assert len(step.plan.program) > 0
    assert step.result.overhead_j == 0


def test_costs_can_be_given() -> None:
    """Costs that the user has are taken as they are."""
    own = rows(nn.Linear(4, 4))
    costs = Costs.estimate(pmt.trace(*own).graph, Device.load("rpi4b"))
    step = pmt.compile(*own, ram="100%", profile=costs)
    assert step.compiled.costs.compute == costs.compute
    assert step.compiled.notes == (f"costs: {costs.source}",)


def test_the_state_dict_and_mode_are_the_users(kept: tuple[Any, pmt.Step]) -> None:
    """No key comes or goes; evaluation runs as before, and training goes on after it."""
    own, step = kept
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
    assert differing(step, *own) == []


def test_other_inputs_are_refused(kept: tuple[Any, pmt.Step]) -> None:
    """Shapes, types, nesting, frozen parameters and autocast: what was, and what is."""
    (model, _, (x, y)), step = kept
    for inputs, words in (
        ((x[:2], y[:2]), r"inputs\[0\] was float32 \[3, 4\].* and is float32 \[2, 4\]"),
        ((x.double(), y), r"is float64 \[3, 4\]"),
        ((x,), "expected 2 inputs"),
        ((x.t().contiguous().t(), y), r"strides \[1, 3\]"),
    ):
        with pytest.raises(pmt.CaptureError, match=words):
            step(*inputs)
    model[0].weight.requires_grad_(False)
    with pytest.raises(pmt.CaptureError, match=r"0\.weight was .*, requiring a gradient and is"):
        step(x, y)
    model[0].weight.requires_grad_(True)
    with torch.autocast("cpu"), pytest.raises(pmt.CaptureError, match="inside of the model"):
        step(x, y)
    step(x, y)


def test_inputs_of_no_use_are_told_at_a_step_as_at_compile(kept: tuple[Any, pmt.Step]) -> None:
    """Names, arrays of numpy, sparse tensors: one sentence, without their values."""
    (_, _, (x, y)), step = kept
    for call in (step, step.verify):
        with pytest.raises(pmt.CaptureError, match=r"expected inputs without names.*got target"):
            call(x, target=y)
        with pytest.raises(pmt.CaptureError, match=r"inputs\[1\]: .* ndarray of numpy; convert"):
            call(x, y.numpy())
        with pytest.raises(pmt.CaptureError, match=r"inputs\[0\]: .*dense"):
            call(x.to_sparse(), y)


def test_other_inputs_are_compiled_for_if_asked() -> None:
    """With retrace each form is compiled once."""
    own, step = simple(dynamic="retrace")
    model, loss_fn, (x, y) = own
    first = step.compiled
    assert differing(step, model, loss_fn, (x[:2], y[:2])) == []
    second = step.compiled
    assert second is not first
    assert differing(step, *own) == []
    assert step.compiled is first
    model.eval()
    assert differing(step, *own) == []
    assert step.compiled not in (first, second)
    model.train()
    step(x[:2], y[:2])
    assert step.compiled is second
    step.close()


@pytest.mark.slow
def test_a_percentage_is_the_same_bytes_for_all_inputs() -> None:
    """The last, smaller batch of an epoch has the RAM of the others; a larger one has no more."""
    torch.manual_seed(1)
    model, loss_fn, (x, y) = residual_step(size=16)
    step = pmt.compile(model, loss_fn, (x, y), ram="90%", device="rpi4b", dynamic="retrace")
    budget, whole = step.budget_bytes, step.compiled.keep_all_bytes
    assert differing(step, model, loss_fn, (x[:1], y[:1])) == []
    assert step.compiled.keep_all_bytes < whole
    assert step.budget_bytes == budget
    with pytest.raises((InputError, NoScheduleError), match="ram"):
        step(torch.cat((x, x)), torch.cat((y, y)))
    step(x, y)
    assert step.budget_bytes == budget == int(0.9 * whole)


def test_time_is_minimized_where_costs_are_those_of_this_host() -> None:
    """Energy where they are a device's; what was chosen is in the report."""
    own = rows(nn.Linear(4, 4))
    traced = pmt.trace(*own)
    estimated = Costs.estimate(traced.graph, Device.load("rpi4b"))
    for options, aim in (
        ({}, "time"),
        ({"profile": pmt.measure(traced, repeats=1)}, "time"),
        ({"device": "rpi4b"}, "energy"),
        ({"profile": estimated}, "energy"),
        ({"minimize": "energy"}, "energy"),
        ({"minimize": "writes", "device": "rpi4b"}, "writes"),
    ):
        step = pmt.compile(*own, ram="100%", **options)
        assert step.result.problem.minimize == aim
        assert f"minimized: {aim}" in step.report()["costs"]


def test_costs_are_measured_with_the_threads_that_run() -> None:
    """As many as PyTorch is set to; profile, certificate and summary say how many."""
    before = torch.get_num_threads()
    own = rows(nn.Linear(4, 4))
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
        ({"ram": "100%", "dynamic": "maybe"}, "dynamic: expected error or retrace"),
        ({"ram": "100%", "paging": True}, "paging: needs a folder"),
        ({"ram": "100%", "device": "rpi4b", "profile": object()}, "not both"),
        ({"ram": "many", "device": "rpi4b"}, "ram: expected"),
        ({"ram": "100%", "profile": 5}, "profile: expected what `measure` returns, got 5"),
        ({"ram": "100%", "storage": 5}, "storage: expected a folder, got 5"),
        ({"ram": "100%", "storage": ""}, "storage: .*got ''"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: Any, words: str) -> None:
    """Each with a sentence."""
    with pytest.raises(InputError, match=words):
        pmt.compile(*rows(nn.Linear(4, 4)), **options)


@pytest.mark.parametrize(
    ("ram", "kind"),
    [
        (10_000, BudgetError),
        pytest.param("0%", BudgetError, marks=pytest.mark.slow),
        ("30%", NoScheduleError),
    ],
)
def test_budgets_that_cannot_be_kept_are_told(ram: Any, kind: type[Exception]) -> None:
    """What is reserved and for what, and the least that is usable, which is."""
    torch.manual_seed(1)
    own = residual_step()
    with pytest.raises(kind, match=r"is too little: .* B are reserved") as caught:
        pmt.compile(*own, ram=ram, device="rpi4b")
    text = str(caught.value)
    assert "tensors of less than 0 B" not in text
    found = re.search(r"give at least ram=([\d,]+) B \(([\d.]+)%\)", text)
    assert found is not None
    least, share = int(found[1].replace(",", "")), float(found[2])
    reserved = re.search(r"too little: ([\d,]+) B are reserved \((.*?)\), and operations", text)
    assert reserved is not None
    parts = re.findall(r" ([\d,]+) B(?:;|$)", reserved[2])
    assert sum(int(p.replace(",", "")) for p in parts) == int(reserved[1].replace(",", ""))
    traced = pmt.trace(*own)
    assert least == least_bytes(traced)
    assert least <= share / 100 * keep_all_bytes(traced) < least * 1.01
    for budget in (least, int(share / 100 * keep_all_bytes(traced))):
        assert floor_bytes(coarsened(traced, budget_bytes=budget)) <= budget


def test_a_budget_above_the_floor_is_explained_too() -> None:
    """What the solver was given is told as the user's budget less what is reserved."""
    torch.manual_seed(1)
    own = residual_step()
    least = least_bytes(pmt.trace(*own))
    words = rf"no schedule keeps .*; that RAM budget is ram={least:,} B less the [\d,]+ B"
    with pytest.raises(NoScheduleError, match=words):
        pmt.compile(*own, ram=least, recompute=False, device="rpi4b")


def test_a_profile_of_another_step_is_refused() -> None:
    """Measured costs and given ones; the operation is named."""
    costs = Costs.estimate(pmt.trace(*residual_step()).graph, Device.load("rpi4b"))
    with pytest.raises(InputError, match="profile: its costs are those of another step"):
        pmt.compile(*rows(nn.Linear(4, 4)), ram="100%", profile=costs)


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    """A file in the folder's place, when costs are measured there and when they are not."""
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InputError, match="page file"):
            pmt.compile(*rows(nn.Linear(4, 4)), ram="100%", storage=folder)


def test_inference_mode_is_refused() -> None:
    """Its tensors could never be trained on; nothing is left behind."""
    own, step = simple(dynamic="retrace")
    with torch.inference_mode():
        with pytest.raises(pmt.CaptureError, match="inference mode is on"):
            step(*own[2])
        with pytest.raises(pmt.CaptureError, match="inference mode"):
            keep_all(*own)
    assert all(parameter.grad is None for parameter in own[0].parameters())
    assert differing(step, *own) == []


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_step_cannot_be_copied(copied: Any, kept: tuple[Any, pmt.Step]) -> None:
    """The error says what can."""
    _, step = kept
    with pytest.raises(TypeError, match="compile a step of the copy"):
        copied(step)


def test_autocast_around_compile_is_refused() -> None:
    """Autocast belongs inside of the model."""
    with torch.autocast("cpu"), pytest.raises(pmt.CaptureError, match="inside"):
        keep_all(*rows(nn.Linear(4, 4)))


def test_other_devices_are_refused() -> None:
    """Only the processor runs steps."""
    model = nn.Linear(4, 4, device="meta")
    inputs = (torch.randn(3, 4, device="meta"), torch.randn(3, 4, device="meta"))
    with pytest.raises(InputError, match="on meta"):
        keep_all(model, nn.functional.mse_loss, inputs)


def test_frozen_layers_shrink_the_graph() -> None:
    """Fine-tuning the last layers has fewer operations and a lower peak."""
    torch.manual_seed(1)
    own = residual_step()
    whole = keep_all(*own).compiled
    for layer in own[0][:4]:
        layer.requires_grad_(False)
    part = keep_all(*own)
    assert len(part.compiled.trace.graph.nodes) < len(whole.trace.graph.nodes)
    assert part.compiled.keep_all_bytes < whole.keep_all_bytes
    assert differing(part, *own) == []
    assert own[0][0].weight.grad is None


@pytest.mark.parametrize(("stream", "is_terminal"), [(Terminal, True), (io.StringIO, False)])
def test_stages_are_shown_on_a_terminal_only(
    stream: Callable[[], io.StringIO], is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stage has its turn; a pipe gets nothing."""
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
