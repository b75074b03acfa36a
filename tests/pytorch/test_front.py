"""The front: guards of a step, side effects, readings; private names of PyTorch."""

import os
import random
import re
import time
import uuid
from datetime import datetime
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo import config as dynamo_config

import poetmodel.torch as pmt
from kit.rotation import mark_seeds_except
from poetmodel.torch.capturing.front import Changed, StepFront
from poetmodel.torch.capturing.front_private import CHECKPOINT, LOGGING_SETTINGS, SETTINGS
from poetmodel.torch.capturing.joint import check_snapshot
from poetmodel.torch.errors import CaptureError


class Model(nn.Module):
    """A layer, and a function of its result."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.function = function
        self.scale, self.table, self.mode, self.n, self.log = 1.0, {"a": [1.0]}, "mean", 0, []

    def forward(self, x, mask):
        """Return a loss."""
        return self.function(self, self.layer(x), mask).square().mean()


def batch(*mask):
    """Return rows with a mask."""
    torch.manual_seed(2)
    return torch.randn(3, 4), torch.tensor(mask or (1, 1, 0), dtype=torch.bool)


def execute(capture, tensors):
    """Execute the graph of a capture."""
    return [output.detach() for output in capture.graph_module(*tensors)]


def captured(function):
    """Return a model and its front, captured for a batch."""
    model = Model(function)
    front = StepFront("net", model, None)
    front.capture(batch())
    return model, front


# -- private names of PyTorch ----------------------------------------------------------------------
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_dynamo_are_where_they_were(name):
    """A release that moves a setting changes the guards or refusals of a capture."""
    assert hasattr(dynamo_config, name)


def test_other_names_of_dynamo_are_where_they_were():
    """The setting of logging calls has one of two names; checkpoints are an operator."""
    assert any(hasattr(dynamo_config, name) for name in LOGGING_SETTINGS)
    graphs = []

    def keep(graph_module, _):
        graphs.append(graph_module)
        return graph_module

    def checkpointed(x):
        return torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False)

    torch.compile(checkpointed, backend=keep, fullgraph=True)(torch.ones(2, requires_grad=True))
    assert any(node.target is CHECKPOINT for node in graphs[0].graph.nodes)


# -- guards ----------------------------------------------------------------------------------------
FACTOR = {"n": 1.0}


def scaled(model, y, _):
    """Read Python values of several places."""
    scale = model.scale * model.table["a"][0] * FACTOR["n"]
    return y * scale if model.mode == "mean" and not model.log else y


CHANGES = (
    (lambda m: setattr(m, "scale", 2.0), r"^scale was 1\.0 and is 2\.0, read at "),
    (lambda m: m.table["a"].__setitem__(0, 3.0), r"^table\['a'\]\[0\] was 1\.0 and is 3\.0, read"),
    (lambda m: m.table.update(a=(1.0,)), r"^table\['a'\] was (a list|of another type) and is \(1"),
    (lambda m: setattr(m, "mode", "sum"), r"^mode was 'mean' and is 'sum', read at "),
    (lambda m: m.log.append(1), r"^log was empty or false and is \[1\], read at "),
    (lambda _: FACTOR.update(n=2.0), r"FACTOR\['n'\] was 1\.0 and is 2\.0, read at "),
)  # fmt: skip


def test_a_change_is_named_with_both_values_and_its_line(monkeypatch):
    """One sentence names values and line; with the former value, the capture is valid again."""
    monkeypatch.setitem(FACTOR, "n", 1.0)
    model, front = captured(scaled)
    for change, words in CHANGES:
        assert front.find(batch())[0] is front.captures[0]
        change(model)
        with pytest.raises(Changed) as caught:
            front.find(batch())
        (reason,) = caught.value.reasons
        assert re.search(words, reason)
        assert "test_front.py:" in reason
        assert "\n" not in reason
        model.scale, model.table, model.mode, model.log = 1.0, {"a": [1.0]}, "mean", []
        FACTOR["n"] = 1.0
    model.scale = 2.0
    second = front.capture(batch())
    assert second is not front.captures[0]
    assert front.find(batch())[0] is second


def test_a_capture_belongs_to_one_step():
    """Two steps of one class have captures of their own, and other shapes have others."""
    _, front = captured(scaled)
    _, other = captured(scaled)
    assert len(front.captures) == len(other.captures) == 1
    x, mask = batch()
    with pytest.raises(Changed, match="expected 3, actual 2"):
        front.find((x[:2], mask))


# -- side effects ----------------------------------------------------------------------------------
def count(model, y, _):
    """Count in an attribute and a list, and store a tensor."""
    model.n += 1
    model.last = y
    return y * model.n


def test_side_effects_follow_a_call_and_nothing_else():
    """A capture, a request of the capture, and a call that fails change no state."""
    model, front = captured(count)
    front.find(batch())

    def fail(_, __):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        front.call(batch(), fail)
    assert model.n == 0
    assert "last" not in vars(model)
    twin = Model(count)
    expected = twin(*batch())
    assert torch.equal(front.call(batch(), execute)[0], expected)
    assert model.n == 1
    assert torch.equal(model.last, twin.last)
    with pytest.raises(Changed, match="n was 0 and is 1"):
        front.call(batch(), execute)


def test_buffers_that_forward_assigns_keep_their_tensor():
    """The new value is copied into it."""

    def assign(model, y, _):
        model.calls = model.calls + 1
        return y * model.calls

    model = Model(assign)
    calls = model.calls
    front = StepFront("net", model, None, assigned_buffers=[(model, "calls")])
    front.capture(batch())
    assert torch.equal(front.call(batch(), execute)[0], Model(assign)(*batch()))
    assert model.calls is calls
    assert float(calls) == 1


def test_further_outputs_are_returned_detached():
    """They are found by the steps that lead to them."""

    class Named(Model):
        def forward(self, x, mask):
            y = self.layer(x)
            return {"loss": super().forward(x, mask), "logits": (y, y + 1)}

    model = Named(scaled)
    access = ((False, "logits"), (False, 1))
    front = StepFront("net", model, None, accesses=[access])
    front.capture(batch())
    loss, output = front.call(batch(), execute)
    expected = model(*batch())
    assert torch.equal(loss, expected["loss"])
    assert torch.equal(output, expected["logits"][1])
    assert not output.requires_grad


# -- readings --------------------------------------------------------------------------------------
READINGS = {
    "flag": lambda _, y, m: y * 2 if m.all() else y,
    "item": lambda _, y, m: y * m.sum().item(),
    "mask": lambda _, y, m: y[m],
    "selected": lambda _, y, m: y.masked_select(m[:, None]),
    "nonzero": lambda _, y, m: y * len(m.nonzero()),
    "where": lambda _, y, m: y[torch.where(m)[0]],
    "list": lambda _, y, m: y * (1 + m.tolist().count(True)),
    "equal": lambda _, y, m: y if torch.equal(m, m.flip(0)) else y - 1,
    "repeated": lambda _, y, m: y.repeat_interleave(m.long() + 1, 0),
    "slice": lambda _, y, m: y[:, : m.sum()],
}


@pytest.mark.parametrize("name", mark_seeds_except(READINGS, ("mask", "slice")))
def test_what_python_reads_of_inputs_is_checked_before_a_step(name):
    """Other values have separate captures; each has eager's results."""
    model = Model(READINGS[name])
    front = StepFront("net", model, None)
    with pytest.raises(CaptureError):
        front.capture(batch())
    front.record_readings(batch())
    if name == "slice" and torch.__version__.startswith("2.9."):
        with pytest.raises(CaptureError, match="slices with Tensor"):
            front.capture(batch())
        return
    front.capture(batch())
    assert torch.equal(front.call(batch(), execute)[0], model(*batch()))
    other = batch(1, 1, 1)
    with pytest.raises(Changed, match=r"at .*test_front.py:.* was .* and is "):
        front.call(other, execute)
    front.record_readings(other)
    front.capture(other)
    for rows in (other, batch()):
        front.record_readings(rows)
        assert torch.equal(front.call(rows, execute)[0], model(*rows))
    assert len(front.captures) == 2


REFUSED = {
    "parameter": (lambda m, y, _: y if m.layer.weight.sum() > 0 else -y, "depends on parameters"),
    "random number": (lambda _, y, __: y * torch.rand(()).item(), "a random number is read"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_readings_that_no_check_can_know_are_refused(name):
    """With the line."""
    function, words = REFUSED[name]
    front = StepFront("net", Model(function), None)
    with pytest.raises(CaptureError):
        front.capture(batch())
    front.record_readings(batch())
    with pytest.raises(
        CaptureError, match=rf"(?s)test_front\.py:.*{words}|{words}.*test_front\.py:"
    ):
        front.capture(batch())


def test_tests_for_finite_numbers_are_checked_at_the_end():
    """They depend on parameters."""
    front = StepFront("net", Model(lambda _, y, __: y if torch.isfinite(y).all() else y * 0), None)
    with pytest.raises(CaptureError):
        front.capture(batch())
    front.record_readings(batch())
    (reading,) = front.capture(batch()).readings
    assert reading.is_late
    assert reading.value is True
    assert "test_front.py:" in reading.line


# -- snapshots -------------------------------------------------------------------------------------
def toggle(model, y, _):
    """Change a number, and back."""
    model.n = 1 - model.n
    return y * (2 if model.n else 3)


def settle(model, y, _):
    """Set a flag, and fill a table once."""
    if "mask" not in model.table:
        model.table["mask"] = torch.ones(4)
    model.flag = True
    return y * model.table["mask"]


def toggle_global(_, y, __):
    """Change a number outside of the model, and back."""
    FACTOR["on"] = not FACTOR.get("on")
    return y * (2 if FACTOR["on"] else 3)


def begin(model, y, _):
    """Compute another loss in the first pass."""
    is_first, model.table["begun"] = "begun" not in model.table, True
    return y * 2 if is_first else y


def detach_first(model, y, _):
    """Compute other gradients in the first pass, of the same loss."""
    is_first, model.table["begun"] = "begun" not in model.table, True
    return y + y.detach() if is_first else y * 2


def remember(model, y, _):
    """Add the result of the pass before, in all passes but the first."""
    last, model.table["last"] = model.table.get("last"), y.detach()
    return y if last is None else y + last


def keep(model, y, mask):
    """Keep what the first pass makes of an input."""
    if "mask" not in model.table:
        model.table["mask"] = mask[:, None].float()
    return y * model.table["mask"]


GENERATOR = np.random.default_rng(1)
PLACE = r".* at .*test_front\.py:\d+ \("
CHANGING = {
    "counter": (count, r"forward changes n from 0 to 1 at .*\(model\.n \+= 1\)"),
    "toggle": (toggle, r"forward changes n from 0 to 1 at "),
    "global": (toggle_global, rf"forward changes .*FACTOR\['on'\]{PLACE}"),
    "list": (lambda m, y, _: y * len(m.log.append(1) or m.log), r"forward changes log from empty"),
    "first loss": (begin, rf"another loss.* forward changes{PLACE}.*; call the model once"),
    "first gradient": (detach_first, rf"another loss, gradient .* forward changes{PLACE}"),
    "tensor of a pass": (remember, r"reads at .*test_front\.py:\d+ .* a tensor of an earlier pass"),
    "kept input": (keep, r"later passes read .*, made at .*test_front\.py:.* inputs or param"),
    "draw": (lambda _, y, __: y * random.random(), rf"draws from Python's random{PLACE}"),  # noqa: S311
    "draw, read": (
        lambda _, y, m: y * 2 if m.all() or random.random() < 2 else y,  # noqa: S311
        rf"draws from Python's random{PLACE}",
    ),
    "NumPy's draw": (lambda _, y, __: y * float(np.random.rand()), rf"from numpy\.random{PLACE}"),  # noqa: NPY002
    "generator": (lambda _, y, __: y * float(GENERATOR.random()), rf"takes a Generator.*{PLACE}"),
    "clock": (lambda _, y, __: y * time.time(), rf"time\.time{PLACE}.*would be frozen"),
    "counter of time": (lambda _, y, __: y * time.perf_counter(), rf"perf_counter{PLACE}"),
    "date": (lambda _, y, __: y * datetime.now().microsecond, rf"trace .*now{PLACE}"),
    "identifier": (lambda _, y, __: y * (uuid.uuid4().int % 97), rf"urandom{PLACE}"),
    "bytes of the system": (lambda _, y, __: y * os.urandom(1)[0], rf"urandom{PLACE}"),
    "seed": (
        lambda _, y, __: (torch.manual_seed(0), y * torch.rand(()))[1],
        r"is seeded at .*test_front\.py:",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", mark_seeds_except(CHANGING, list(CHANGING)[::2]))
def test_a_snapshot_that_later_steps_do_not_follow_is_refused(name):
    """In one sentence; the model and the random generators are as before."""
    function, words = CHANGING[name]
    model, rows = Model(function), batch()
    states = torch.get_rng_state(), random.getstate()
    with pytest.raises(CaptureError, match=rf"^net: .*{words}") as caught:
        check_snapshot("net", model, None, rows)
    assert "\n" not in str(caught.value)
    assert (model.n, model.log, model.table) == (0, [], {"a": [1.0]})
    assert "last" not in vars(model)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


DOORS = {
    "trace": lambda model, _: pmt.trace(model, None, batch(), measure_workspace=False),
    "export": lambda model, folder: pmt.export(model, None, batch(), folder=folder, ram="64KiB"),
}


@pytest.mark.parametrize(
    ("door", "name"),
    mark_seeds_except(
        list(product(DOORS, ["first loss", "tensor of a pass"])),
        [("trace", "tensor of a pass"), ("export", "first loss")],
    ),
)
def test_every_door_of_snapshots_refuses_what_one_graph_cannot_follow(door, name, tmp_path):
    """A step compiled with guards is not one graph."""
    function, words = CHANGING[name]
    with pytest.raises(CaptureError, match=words):
        DOORS[door](Model(function), tmp_path)
    assert list(tmp_path.iterdir()) == []
    pmt.capture(Model(function), None, batch())


def test_a_snapshot_of_state_that_settles_is_accepted():
    """A flag and a table; buffers may change in each step, and PyTorch draw."""

    def steady(model, y, mask):
        model.calls.add_(1)
        return settle(model, y, mask) * torch.rand(()) * model.calls

    model = Model(steady)
    check_snapshot("net", model, None, batch())
    assert "flag" not in vars(model)
    assert list(model.table) == ["a"]
    assert float(model.calls) == 0
