"""The certificate: it finds what differs, measures what is used, and changes nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from kit.eager_steps import keep_all, outcome, unequal  # noqa: E402
from kit.networks import residual_step  # noqa: E402
from kit.traced_models import rows  # noqa: E402
from poetmodel.device import Device  # noqa: E402
from poetmodel.torch import compile, measure, trace  # noqa: E402
from poetmodel.torch.runtime import certificate  # noqa: E402
from poetmodel.torch.runtime.certificate import certify  # noqa: E402
from poetmodel.torch.runtime.comparison import ResultDifference  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.torch import Step

nn = torch.nn
pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def verified(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Step]]:
    """Return a residual step and it compiled to page and to recompute."""
    torch.manual_seed(1)
    own = residual_step(size=16)
    folder = tmp_path_factory.mktemp("pages")
    with compile(*own, ram="60%", storage=folder, device="rpi4b", recompute=False) as step:
        yield own, step


def test_a_good_step_is_certified(verified: tuple[Any, Step]) -> None:
    """Equal, within the budget and the plan, with as many bytes moved as planned."""
    (model, _, _), step = verified
    found = step.verify()
    assert found.equal
    assert found.within_budget
    assert found.storage_peak_bytes <= found.heap_peak_bytes <= found.plan_peak_bytes
    assert found.plan_peak_bytes <= found.budget_bytes < found.eager_heap_peak_bytes
    assert found.written_bytes == found.plan_written_bytes > 0
    assert found.read_bytes == found.plan_read_bytes > 0
    assert found.time_s > 0
    assert found.eager_time_s > 0
    count = sum(1 for _ in model.parameters()) + sum(1 for _ in model.buffers())
    assert found.compared == 1 + count
    first, second, *_ = found.summary().splitlines()
    assert first == f"Sequential: all {1 + count} results (loss, gradients, buffers) equal eager's"
    assert ", within the budget of " in second
    assert found.second_gradients_bytes == sum(4 * p.numel() for p in model.parameters())
    assert second.endswith("hold those that wait (rollback)")


def test_the_keep_all_peak_is_that_of_eager(verified: tuple[Any, Step]) -> None:
    """100 % of a budget is what eager PyTorch takes, within a few percent."""
    _, step = verified
    eager = step.verify().eager_heap_peak_bytes
    assert step.compiled.keep_all_bytes == pytest.approx(eager, rel=0.1)


def test_verifying_changes_nothing(verified: tuple[Any, Step]) -> None:
    """Parameters, gradients (the same tensors), buffers and random state are as before."""
    (model, _, inputs), step = verified
    step(*inputs)
    zero = torch.zeros(())
    before, gradients = outcome(model, zero), [p.grad for p in model.parameters()]
    step.verify(*inputs)
    assert unequal(before, outcome(model, zero)) == []
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))


def test_a_wrong_result_is_named() -> None:
    """A step of other weights than eager's: which results differ, by how much, from where."""
    torch.manual_seed(1)
    model, loss_fn, inputs = rows(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    step = keep_all(model, loss_fn, inputs)
    run = step.compiled.runner.run

    def wrong(flat: Any, emit: Any, **known: Any) -> Any:
        def doubled(number: int, value: torch.Tensor) -> None:
            emit(number, value * 2 if number == wrong_number else value)

        held = run(flat, doubled, **known)
        torch.rand(1)
        return held

    emissions = step.compiled.trace.parts.emissions
    (wrong_number,) = (k for k, e in enumerate(emissions) if e.result.name == "gradient of 0.bias")
    step.compiled.runner.run = wrong
    found = certify(step.compiled, step.compiled.trace.joint.inputs)
    assert not found.equal
    assert not found.random_equal
    (difference,) = found.differences
    assert difference.name == "gradient of 0.bias"
    assert difference.largest is not None
    assert difference.largest > 0
    assert difference.op.startswith("0/")
    text = found.summary()
    assert "1 of 8 results differ from eager: gradient of 0.bias (by up to " in text
    assert "the random generator is in another state" in text
    above = replace(found, heap_peak_bytes=found.budget_bytes + 1)
    assert "ABOVE the budget" in above.summary()


def test_parameters_that_eager_changes_are_as_before() -> None:
    """A gradient hook that steps an optimizer changes no parameter; results are all counted."""
    torch.manual_seed(1)
    own = rows(nn.Linear(4, 4), nn.Linear(4, 4))
    model = own[0]
    step = keep_all(*own)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def descend(parameter: torch.Tensor) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(descend)
    # Steps refuse such hooks; what verifies them does not rely on that.
    found = certify(step.compiled, step.compiled.trace.joint.inputs)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {difference.name for difference in found.differences} == {
        f"gradient of {name}" for name in before
    }
    assert found.compared == 1 + len(before)


def test_a_planned_time_of_another_device_is_called_so() -> None:
    """The plan's time is told with its device, the measured ones with this host."""
    torch.manual_seed(1)
    own = rows(nn.Linear(4, 4))
    estimated = keep_all(*own)
    found = estimated.verify()
    assert found.plan_device == estimated.compiled.device
    assert found.plan_device == Device.load("rpi4b").name
    assert "a step on this host, plan " in found.summary()
    assert f" on {found.plan_device}, eager " in found.summary()
    measured = replace(found, plan_device=None).summary().splitlines()[-1]
    assert " on " not in measured
    assert estimated.report()["plan"]["device"] == found.plan_device


def test_a_difference_is_plain_values() -> None:
    """What JSON has no number for is told in words."""
    found = ResultDifference(name="loss", largest=float("nan"), op="")
    assert found.to_dict() == {"name": "loss", "largest": None, "told": "by up to nan", "op": ""}
    assert replace(found, largest=0.5).to_dict()["largest"] == 0.5
    assert replace(found, largest=None, op="mm").to_dict()["told"] == "only one of both has it"
    assert str(replace(found, largest=None, op="mm")) == "loss (only one of both has it, from mm)"


@pytest.mark.parametrize(
    ("eager", "ours", "reasons"),
    [
        (1.0, 1.05, []),
        (3.0, 3.0, ["eager PyTorch takes 3.00 times"]),
        (1.0, 2.0, ["beyond what eager shows, the compiled step takes 2.00 times", "its program"]),
        (0.5, 0.5, ["eager PyTorch takes 0.50 times"]),
    ],
)
def test_a_time_that_is_not_the_planned_one_is_explained(
    eager: float, ours: float, reasons: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the costs, which eager shows to be off, or by what the compiled step does beside."""
    torch.manual_seed(1)
    own = rows(nn.Linear(4, 4))
    costs = measure(trace(*own), folder=None, repeats=1).costs
    step = compile(*own, ram="100%", profile=costs, cache=False)
    planned_s = step.compiled.check.makespan_s
    times = iter([planned_s * eager, planned_s * ours])

    class Known(certificate._Timed):
        """A step that takes a known time."""

        def __init__(self, step: Any) -> None:
            super().__init__(step)
            self.taken_s = next(times)

        def __call__(self, **options: Any) -> Any:
            value = super().__call__(**options)
            self.times[-1] = (self.taken_s, self.taken_s)
            return value

    monkeypatch.setattr(certificate, "_Timed", Known)
    found = step.verify()
    assert len(found.reasons) == len(reasons)
    for reason, words in zip(found.reasons, reasons, strict=True):
        assert reason.startswith(words)
        assert reason in found.summary()
    assert found.to_dict()["reasons"] == list(found.reasons)


@pytest.mark.parametrize(("most_s", "runs"), [(0.0, 2), (60.0, certificate.REPEATS)])
def test_long_steps_run_no_more_often_than_they_must(
    most_s: float, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for the results and once for the peak of the heap; short ones for the least time too."""
    step = compile(*rows(nn.Linear(4, 4)), ram="100%", cache=False)
    counted = []

    class Counted(certificate._Timed):
        """A step that tells of its runs."""

        def __init__(self, work: Any) -> None:
            super().__init__(work)
            counted.append(self)

    monkeypatch.setattr(certificate, "_Timed", Counted)
    monkeypatch.setattr(certificate, "MEASURING_S", most_s)
    found = step.verify()
    assert [len(each.times) for each in counted] == [runs, runs]
    eager, ours = counted
    assert found.eager_time_s == min(eager.times)[0]
    assert found.time_s == min(ours.times)[0]


def test_a_board_plan_is_not_held_against_this_host(verified: tuple[Any, Step]) -> None:
    """Its times are another machine's: there is nothing to explain."""
    assert verified[1].verify().reasons == ()
