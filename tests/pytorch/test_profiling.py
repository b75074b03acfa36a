"""Profiles: measured costs that fit the traced graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from poetmodel.device import Costs, Device  # noqa: E402
from poetmodel.device.io import save_profile  # noqa: E402
from poetmodel.errors import InputError  # noqa: E402
from poetmodel.problem import Problem  # noqa: E402
from poetmodel.torch import measure, profiling, trace  # noqa: E402
from poetmodel.torch.energy import Power  # noqa: E402
from traced_models import residual  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.torch


def test_profile_fits_its_graph(tmp_path: Path) -> None:
    """Saved, read again, the costs make a problem with the graph."""
    traced = trace(*residual())
    profile = measure(traced, folder=tmp_path, repeats=1, power_from=Device.load("rpi4b"))
    save_profile(profile.costs, tmp_path / "net.csv")
    costs = Costs.load(tmp_path / "net.csv")
    assert costs == profile.costs
    problem = Problem(traced.graph, costs, ram="100%")
    assert problem.pass_time_s > 0
    for cost in costs.compute.values():
        assert cost.energy_j == 3.0 * cost.time_s
    for page in (costs.pages or {}).values():
        assert page.page_in.energy_j == 0.15 * page.page_in.time_s


def test_notes_say_how_it_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeats, threads, folder, and where energies come from are said."""
    traced = trace(*residual(), measure_workspace=False)
    monkeypatch.setattr(profiling, "measured_power", lambda _: None)
    notes = measure(traced, folder=tmp_path, repeats=2).notes
    assert notes[0] == "compute times: least of 2 steps, 1 thread(s)"
    assert str(tmp_path) in notes[1]
    assert "a nominal 1 W" in notes[2]


def test_counters_are_read_while_the_step_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where counters can be read, their power makes the energies."""
    power = Power(compute_w=5.0, page_in_w=6.0, page_out_w=7.0, source="counters")
    monkeypatch.setattr(profiling, "measured_power", lambda work: work() or power)
    profile = measure(trace(*residual(), measure_workspace=False), folder=tmp_path, repeats=1)
    cost = profile.costs.compute["0/convolution"]
    assert cost.energy_j == 5.0 * cost.time_s
    assert profile.notes[2] == "energies: counters"


def test_tracing_and_measuring_leave_everything_as_it_was(tmp_path: Path) -> None:
    """Parameters, buffers, gradients and random state are those from before."""
    model, loss_fn, inputs = residual()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.get_rng_state()
    measure(trace(model, loss_fn, inputs), folder=tmp_path, repeats=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_only_the_processor_is_measured(tmp_path: Path) -> None:
    """A step on another kind of device is refused with what to do."""
    inputs = (torch.randn(3, 4, device="meta"), torch.randn(3, 4, device="meta"))
    traced = trace(torch.nn.Linear(4, 4, device="meta"), lambda y, t: (y * t).sum(), inputs)
    with pytest.raises(InputError, match="parameters are on meta; estimate its costs"):
        measure(traced, folder=tmp_path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"repeats": 0}, "repeats: expected a whole number from 1, got 0"),
        ({"repeats": "x"}, "repeats: expected a whole number from 1, got 'x'"),
        ({"threads": -1}, "threads: expected a whole number from 1, got -1"),
    ],
)
def test_measurements_that_make_no_sense_are_refused(options: Any, words: str) -> None:
    """Each with a sentence."""
    with pytest.raises(InputError, match=words):
        measure(trace(*residual(), measure_workspace=False), **options)
    with pytest.raises(InputError, match="expected what `trace` returns, got 'x'"):
        measure("x")
