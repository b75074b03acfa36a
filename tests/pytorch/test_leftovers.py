"""What code keeps outside of modules: a capture leaves none of it behind, and works with it."""

from __future__ import annotations

import logging
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

import poetmodel.torch as pmt  # noqa: E402
from kit.eager_steps import differing, keep_all  # noqa: E402
from kit.rotation import quick  # noqa: E402
from kit.traced_models import rows  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

nn = torch.nn
pytestmark = pytest.mark.torch


@pytest.fixture
def keepers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Execute the file of a model anew: the collector of garbage knows all that it holds."""
    path = find_spec("kit.keepers").origin
    spec = spec_from_file_location("keepers", path)
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "keepers", module)
    spec.loader.exec_module(module)
    return module


KEEPERS = quick(
    ["bounded", "unbounded", "in_a_dictionary", "in_a_tuple",
     "in_a_list", "in_a_name", "in_an_object", "in_a_class"],
    ["bounded", "in_a_tuple", "in_a_name"],
)  # fmt: skip


def step_with(table: Callable[[int], Any]) -> Any:
    """Return a step that adds a table to what two layers give, before and after an activation."""
    torch.manual_seed(1)
    return rows(
        nn.Linear(4, 4),
        nn.Linear(4, 4),
        by=lambda p, x: p[1](torch.tanh(p[0](x) * table(4))) + table(4),
    )


@pytest.mark.parametrize("name", KEEPERS)
def test_tables_that_code_keeps_are_as_in_eager(keepers: Any, name: str) -> None:
    """Compiled first, eager after it, and compiled after that: all have the same bits."""
    table = getattr(keepers, name)
    model, loss_fn, inputs = step_with(table)
    step = keep_all(model, loss_fn, inputs)
    alone = model(inputs[0])
    assert torch.equal(table(4), torch.tensor([1.0, 2, 3, 4]) + (name == "in_a_tuple"))
    assert differing(step, model, loss_fn, inputs) == []
    assert torch.equal(model(inputs[0]), alone)
    again = keep_all(model, loss_fn, inputs)
    assert differing(again, model, loss_fn, inputs) == []
    assert differing(step, model, loss_fn, inputs) == []


@pytest.mark.parametrize("name", KEEPERS)
def test_captures_that_fail_leave_nothing_behind(keepers: Any, name: str) -> None:
    """Eager goes on where a step could not be captured."""
    table = getattr(keepers, name)
    own = rows(nn.Linear(4, 4), by=lambda p, x: p[0](x) * table(4) * float(p[0](x).sum()))
    with pytest.raises(pmt.CaptureError, match="reads a tensor's value"):
        pmt.capture(*own)
    own[0](own[2][0]).sum().backward()
    assert float(table(4)[0]) in (1, 2)


def test_what_was_kept_before_is_still_there(keepers: Any) -> None:
    """A name that forward sets anew has its old value afterwards, and the log says so."""
    kept = SimpleNamespace(last=None)
    keepers.TABLES["last"] = torch.ones(2)

    def forward(parts: Any, x: Any) -> Any:
        keepers.NAME = kept.last = parts[0](x)
        return keepers.NAME

    keepers.NAME = before = torch.ones(3)
    pmt.capture(*rows(nn.Linear(4, 4), by=forward))
    assert keepers.NAME is before
    assert kept.last is None


def test_what_compiled_steps_do_not_keep_is_told(
    keepers: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Tables of a cache are no news; what forward notes for others is."""
    with caplog.at_level(logging.WARNING, "poetmodel"):
        pmt.capture(*step_with(keepers.bounded))
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "poetmodel"):
        pmt.capture(*step_with(keepers.in_a_name))
    assert "forward keeps tensors outside of the model (NAME)" in caplog.text


TABLES: dict[str, Any] = {}
NAME: Any = None

# -- constants -----------------------------------------------------------------------------------


def test_values_of_constants_may_change(keepers: Any) -> None:
    """A constant is the tensor that the code holds: what is written into it counts."""
    keepers.TABLES[4] = torch.ones(4)
    own = step_with(keepers.in_a_dictionary)
    step = keep_all(*own)
    keepers.TABLES[4].mul_(3)
    assert differing(step, *own) == []


@pytest.mark.parametrize("place", ["module", "file"])
def test_another_tensor_in_the_place_of_a_constant_is_noticed(place: str) -> None:
    """A step that would go on with the old tensor is refused, or compiled again."""
    own = rows(nn.Linear(4, 4), by=lambda p, x: p[0](x) * (p[0].scale + NAME))
    holder = vars(own[0].parts[0]) if place == "module" else globals()
    key = "scale" if place == "module" else "NAME"
    own[0].parts[0].scale = torch.ones(4)
    globals()["NAME"] = torch.ones(4)
    step = keep_all(*own)
    again = keep_all(*own, dynamic="retrace")
    assert differing(step, *own) == []
    holder[key] = torch.full((4,), 2.0)
    with pytest.raises(pmt.CaptureError, match=rf"\.{key} is another tensor, or gone"):
        step(*own[2])
    assert differing(again, *own) == []


def written(parts: Any, x: Any) -> Any:
    """Count in a tensor of the file."""
    TABLES["count"].add_(1)
    return parts[0](x) * TABLES["count"]


def written_from_inputs(parts: Any, x: Any) -> Any:
    """Keep a mean in a tensor of the file."""
    TABLES["count"].copy_(x.mean())
    return parts[0](x) * TABLES["count"]


@pytest.mark.parametrize("forward", [written, written_from_inputs])
def test_constants_that_change_in_the_step_are_refused(forward: Any) -> None:
    """The error names the line and what to do; the tensor is as it was."""
    TABLES["count"] = torch.zeros(4)
    with pytest.raises(pmt.CaptureError, match=r"is changed at .*test_leftovers.*register_buffer"):
        pmt.capture(*rows(nn.Linear(4, 4), by=forward))
    assert TABLES["count"].tolist() == [0, 0, 0, 0]


def test_constants_that_wait_for_a_gradient_are_refused() -> None:
    """A trained tensor that is no parameter would get none; one that is only read is a constant."""
    TABLES["scale"] = torch.ones(4, requires_grad=True)
    with pytest.raises(pmt.CaptureError, match=r"requires a gradient is used at .*register_buffer"):
        pmt.capture(*rows(nn.Linear(4, 4), by=lambda p, x: p[0](x) * TABLES["scale"]))

    def read(parts: Any, x: Any) -> Any:
        with torch.no_grad():
            teacher = x * TABLES["scale"]
        return parts[0](x) + teacher

    own = rows(nn.Linear(4, 4), by=read)
    assert differing(keep_all(*own), *own) == []
