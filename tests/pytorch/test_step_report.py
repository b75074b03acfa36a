"""What is known of a compiled step: as plain values, as a file, as a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from kit.eager_steps import keep_all  # noqa: E402
from kit.networks import residual_step  # noqa: E402
from kit.pages import read_page  # noqa: E402
from kit.traced_models import rows  # noqa: E402
from poetmodel.device import Device  # noqa: E402
from poetmodel.errors import InputError, MissingExtraError  # noqa: E402
from poetmodel.report.page import LIBRARIES  # noqa: E402
from poetmodel.report.presenter import look_up  # noqa: E402
from poetmodel.report.step_file import parse_step, step_subject  # noqa: E402
from poetmodel.torch import compile, measure, trace  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.torch import Step

nn = torch.nn
pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Step]:
    """Return a verified step that pages."""
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("pages")
    own = residual_step(size=16)
    with compile(*own, ram="60%", storage=folder, device="rpi4b", recompute=False) as found:
        found.verify()
        yield found


def need_libraries() -> None:
    """Skip where pages cannot be made."""
    for name in LIBRARIES:
        pytest.importorskip(name)


def test_the_report_is_plain(step: Step) -> None:
    """JSON gives back exactly what went in, also before there is a certificate."""
    found = step.report()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["certificate"]["equal"] is True
    assert found["plan"]["peak_bytes"] == step.compiled.peak_bytes
    assert found["result"]["status"] == str(step.result.status)
    assert found["graph"]["nodes"] == len(step.compiled.trace.graph.nodes)
    assert found["torch"] == torch.__version__
    torch.manual_seed(1)
    fresh = keep_all(*rows(nn.Linear(4, 4))).report()
    assert fresh["certificate"] is None
    assert json.loads(json.dumps(fresh, allow_nan=False)) == fresh


def test_the_judge_agrees_with_the_step(step: Step) -> None:
    """The schedule of a report is valid, and its plan is the one that runs."""
    found = step_subject(step.report(), source="step.json")
    assert found.verdict.valid
    assert found.plan is not None
    assert found.plan.program == step.plan.program
    assert found.simulation.energy_j == pytest.approx(step.result.energy_j)
    assert [note for note in found.notes if "reserved" not in note] == []


def test_a_page_is_written(step: Step, tmp_path: Path) -> None:
    """It has the figures that are returned, and how to compile the step again."""
    need_libraries()
    out = tmp_path / "step.html"
    found = step.report(out)
    page = read_page(out.read_text(encoding="utf-8"))
    shown = {key: value for (_, key), value in page.values.items() if key.startswith("step.")}
    assert shown["step.certificate.heap_peak_bytes"] == found["certificate"]["heap_peak_bytes"]
    assert shown["step.certificate.written_bytes"] > 0
    for key, value in shown.items():
        assert look_up({"step": found}, key) == value
    assert "Equal" in page.text
    assert "Kept" in page.text
    assert found["call"] in page.text
    assert "estimated for device rpi4b" in page.text
    assert page.values["A", "valid"] is True


def test_a_page_tells_what_was_found_wrong(tmp_path: Path) -> None:
    """A step that does not compute what eager does: the result and its operation are named."""
    need_libraries()
    torch.manual_seed(1)
    wrong = keep_all(*rows(nn.Linear(4, 4)))
    run = wrong.compiled.runner.run
    wrong.compiled.runner.run = lambda flat, emit, **known: run(
        flat, lambda k, value: emit(k, value * 2), **known
    )
    certificate = wrong.verify()
    wrong.report(tmp_path / "step.html")
    text = read_page((tmp_path / "step.html").read_text(encoding="utf-8")).text
    assert "Different" in text
    assert certificate.differences
    for difference in certificate.differences:
        assert str(difference) in text


def test_a_certificate_is_that_of_what_ran() -> None:
    """What was found of a step for some inputs is not said of it for others."""
    torch.manual_seed(1)
    model, loss_fn, (x, y) = rows(nn.Linear(4, 4))
    both = keep_all(model, loss_fn, (x, y), dynamic="retrace")
    both.verify()
    both(torch.cat((x, x)), torch.cat((y, y)))
    assert both.report()["certificate"] is None
    both(x, y)
    assert both.report()["certificate"] is not None


def test_figures_are_written_as_json(step: Step, tmp_path: Path) -> None:
    """The file holds what is returned, in a form that the report takes."""
    out = tmp_path / "step.json"
    found = step.report(str(out))
    assert parse_step(out.read_text(encoding="utf-8")) == found


def test_other_files_are_refused(step: Step, tmp_path: Path) -> None:
    """The two kinds are named, and nothing is written."""
    with pytest.raises(InputError, match=r"step.txt: expected a file \*.html, .* or \*.json"):
        step.report(tmp_path / "step.txt")
    with pytest.raises(InputError, match="does not exist"):
        step.report(tmp_path / "none" / "step.json")
    assert list(tmp_path.iterdir()) == []


def test_the_missing_extra_is_told(
    step: Step, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is missing, and what brings it; figures need nothing."""
    monkeypatch.setattr("poetmodel.report.drawing.find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=r"needs jinja2 and plotly.*poetmodel\[report\]"):
        step.report(tmp_path / "step.html")
    step.report(tmp_path / "step.json")
    assert [path.name for path in tmp_path.iterdir()] == ["step.json"]


def test_the_call_names_what_was_chosen() -> None:
    """Defaults are left out; devices and profiles are named."""
    torch.manual_seed(1)
    own = rows(nn.Linear(4, 4))
    board = compile(*own, ram=10**6, device=Device.load("rpi4b"), gap=0.5, dynamic="retrace")
    assert board.report()["call"] == (
        "poetmodel.torch.compile(model, loss_fn, inputs, ram=1000000, device='rpi4b', gap=0.5, "
        "dynamic='retrace')"
    )
    profile: Any = measure(trace(*own), repeats=1)
    own_costs = compile(*own, ram="100%", profile=profile, storage=Path(), paging=False)
    assert own_costs.report()["call"] == (
        "poetmodel.torch.compile(model, loss_fn, inputs, ram='100%', storage='.', paging=False, "
        "profile=profile)"
    )
