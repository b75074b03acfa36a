"""Results about a compiled step: its certificate, as plain values, as a file, as a page."""

import json
from dataclasses import replace

import pytest
import torch

from kit.eager_steps import compile_keep_all
from kit.networks import residual_step
from kit.pages import read_page
from kit.traced_models import row_step
from poetmodel.device import Device
from poetmodel.errors import InputError, MissingExtraError
from poetmodel.report.page import LIBRARIES
from poetmodel.report.presenter import value_at_path
from poetmodel.torch import compile
from poetmodel.torch.runtime import certificate
from poetmodel.torch.runtime.comparison import ResultDifference

nn = torch.nn


@pytest.fixture(scope="module")
def verified(tmp_path_factory):
    """Return a residual step that is compiled with paging, and its verification."""
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("pages")
    own = residual_step(size=16)
    with compile(*own, ram="60%", storage=folder, device="rpi4b", recompute=False) as step:
        yield step, step.verify()


@pytest.fixture
def step(verified):
    """Return the step."""
    return verified[0]


def test_a_good_step_is_certified(verified):
    """Equal, within the budget and the plan, with as many bytes moved as planned."""
    step, found = verified
    model = step.compiled.trace.joint.module.get_submodule("model")
    assert found.equal
    assert found.within_budget
    assert found.heap_peak_bytes <= found.plan_peak_bytes
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
    assert second.endswith("more for delayed gradients")
    # The whole budget, 100 %, is what eager PyTorch takes, within a few percent.
    assert step.compiled.keep_all_bytes == pytest.approx(found.eager_heap_peak_bytes, rel=0.1)
    assert step.report()["plan"]["device"] == found.plan_device == step.compiled.device
    assert found.plan_device == Device.load("rpi4b").name
    assert "a step on this host, plan " in found.summary()
    assert f" on {found.plan_device}, eager " in found.summary()
    assert " on " not in replace(found, plan_device=None).summary().splitlines()[-1]


def need_libraries():
    """Skip where pages cannot be made."""
    for name in LIBRARIES:
        pytest.importorskip(name)


def test_a_wrong_result_is_named(tmp_path):
    """A step of other weights than eager's: which results differ, by how much, from where."""
    model, loss_fn, inputs = row_step(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    step = compile_keep_all(model, loss_fn, inputs)
    run = step.compiled.runner.execute_program

    def wrong(flat, emit, **known):
        def doubled(number, value):
            emit(number, value * 2 if number == wrong_number else value)

        held = run(flat, doubled, **known)
        torch.rand(1)
        return held

    emissions = step.compiled.trace.outputs
    (wrong_number,) = (k for k, e in enumerate(emissions) if e.result.name == "gradient of 0.bias")
    step.compiled.runner.execute_program = wrong
    found = step.verify()
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
    need_libraries()
    step.report(tmp_path / "step.html")
    page = read_page((tmp_path / "step.html").read_text(encoding="utf-8")).text
    assert "Different" in page
    assert str(difference) in page


def test_a_difference_is_plain_values():
    """Values that JSON does not support are words."""
    found = ResultDifference(name="loss", largest=float("nan"), op="")
    assert found.to_dict() == {"name": "loss", "largest": None, "text": "by up to nan", "op": ""}
    assert replace(found, largest=0.5).to_dict()["largest"] == 0.5
    assert (
        replace(found, largest=None, op="mm").to_dict()["text"]
        == "only one of both has it, or the shapes differ"
    )
    assert (
        str(replace(found, largest=None, op="mm"))
        == "loss (only one of both has it, or the shapes differ, from mm)"
    )


@pytest.mark.parametrize(("most_s", "runs"), [(0.0, 2), (60.0, certificate.REPEATS)])
def test_long_steps_run_no_more_often_than_they_must(most_s, runs, monkeypatch):
    """Once for the results and once for the peak of the heap; short ones for the least time too."""
    step = compile(*row_step(nn.Linear(4, 4)), ram="100%", cache=False)
    counted = []

    class Counted(certificate._TimedStep):
        """A step that counts its runs."""

        def __init__(self, work):
            super().__init__(work)
            counted.append(self)

    monkeypatch.setattr(certificate, "_TimedStep", Counted)
    monkeypatch.setattr(certificate, "MEASURING_S", most_s)
    found = step.verify()
    assert [len(each.times_s) for each in counted] == [runs, runs]
    eager, ours = counted
    assert found.eager_time_s == min(eager.times_s)
    assert found.time_s == min(ours.times_s)


# -- reports ---------------------------------------------------------------------------------------
def test_the_report_is_plain(step):
    """JSON returns exactly the same values, also before there is a certificate."""
    found = step.report()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["certificate"]["equal"] is True
    assert found["plan"]["peak_bytes"] == step.compiled.peak_bytes
    assert found["result"]["status"] == str(step.result.status)
    assert found["graph"]["nodes"] == len(step.compiled.trace.graph.nodes)
    assert found["torch"] == torch.__version__
    fresh = compile_keep_all(*row_step(nn.Linear(4, 4))).report()
    assert fresh["certificate"] is None
    assert json.loads(json.dumps(fresh, allow_nan=False)) == fresh


def test_a_page_is_written(step, tmp_path):
    """It has the figures that are returned, and how to compile the step again."""
    need_libraries()
    out = tmp_path / "step.html"
    found = step.report(out)
    page = read_page(out.read_text(encoding="utf-8"))
    shown = {key: value for (_, key), value in page.values.items() if key.startswith("step.")}
    assert shown["step.certificate.heap_peak_bytes"] == found["certificate"]["heap_peak_bytes"]
    assert shown["step.certificate.written_bytes"] > 0
    for key, value in shown.items():
        assert value_at_path({"step": found}, key) == value
    assert "Equal" in page.text
    assert "Met" in page.text
    assert found["call"] in page.text
    assert "estimated for device rpi4b" in page.text
    assert page.values["A", "valid"] is True


def test_a_certificate_is_that_of_what_ran():
    """After a step on other inputs, the report has no certificate until the first ones return."""
    model, loss_fn, (x, y) = row_step(nn.Linear(4, 4))
    both = compile_keep_all(model, loss_fn, (x, y), dynamic="retrace")
    both.verify()
    both(torch.cat((x, x)), torch.cat((y, y)))
    assert both.report()["certificate"] is None
    both(x, y)
    assert both.report()["certificate"] is not None


def test_other_files_are_refused(step, tmp_path, monkeypatch):
    """The two kinds are named, and nothing is written.

    Pages need an extra, which the error names; pictures need none.
    """
    expected = r"step.txt: expected a file \*.html for a page, or \*.json for values"
    with pytest.raises(InputError, match=expected):
        step.report(tmp_path / "step.txt")
    with pytest.raises(InputError, match="does not exist"):
        step.report(tmp_path / "none" / "step.json")
    monkeypatch.setattr("poetmodel.report.drawing.find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=r"needs jinja2 and plotly.*poetmodel\[report\]"):
        step.report(tmp_path / "step.html")
    assert list(tmp_path.iterdir()) == []
    found = step.report(str(tmp_path / "step.json"))
    assert json.loads((tmp_path / "step.json").read_text(encoding="utf-8")) == found


def test_the_call_names_what_was_chosen():
    """Defaults are left out; devices are named."""
    own = row_step(nn.Linear(4, 4))
    board = compile(*own, ram=10**6, device=Device.load("rpi4b"), gap=0.5, dynamic="retrace")
    assert board.report()["call"] == (
        "poetmodel.torch.compile(model, loss_fn, inputs, ram=1000000, device='rpi4b', gap=0.5, "
        "dynamic='retrace')"
    )
