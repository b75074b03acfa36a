"""What a compile knows from earlier ones: the same answers, and none that no longer hold."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

import poetmodel.torch as pmt  # noqa: E402
from kit.traced_models import Residual, Through  # noqa: E402
from poetmodel.result import Status, Termination  # noqa: E402
from poetmodel.torch import cache as cache_module  # noqa: E402
from poetmodel.torch import compiled as preparation  # noqa: E402
from poetmodel.torch import known_steps  # noqa: E402
from poetmodel.torch.runtime import profiling  # noqa: E402
from poetmodel.torch.runtime.convolutions import kernels_told  # noqa: E402
from poetmodel.torch.step import units  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

nn = torch.nn
pytestmark = pytest.mark.torch


def own(batch: int = 2) -> tuple[Any, ...]:
    """Return a step of blocks of convolutions with batch norm and dropout."""
    torch.manual_seed(1)
    layers = [*(Residual(8) for _ in range(3)), nn.Dropout(0.1), nn.Conv2d(8, 8, 1)]
    inputs = torch.randn(batch, 8, 24, 24), torch.randn(batch, 8, 24, 24)
    return nn.Sequential(*layers), nn.functional.mse_loss, inputs


def compiled(step: tuple[Any, ...], folder: Path, **options: Any) -> pmt.Step:
    """Compile a step for 85 % of the memory, with what is known in a folder."""
    model, loss_fn, inputs = step
    return pmt.compile(model, loss_fn, inputs, cache=folder, **({"ram": "85%"} | options))


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> tuple[pmt.Step, Path]:
    """Return the step, and a folder in which it is known."""
    folder = tmp_path_factory.mktemp("known")
    return compiled(own(), folder), folder


@pytest.fixture
def folder(known: tuple[pmt.Step, Path], tmp_path: Path) -> Path:
    """Return a folder of the test's own in which the step is known."""
    return Path(shutil.copytree(known[1], tmp_path / "known"))


class Counted:
    """Counts the runs, solves and checks of a compile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: dict[str, int] = {}
        for module, name in (
            (units, "replay"),
            (profiling, "unit_times_s"),
            (preparation, "solve"),
            (preparation, "check_agreement"),
        ):
            self._count(monkeypatch, module, name, getattr(module, name))

    def _count(self, patch: Any, module: Any, name: str, function: Callable[..., Any]) -> None:
        def counted(*given: Any, **options: Any) -> Any:
            self.counts[name] = self.counts.get(name, 0) + 1
            return function(*given, **options)

        patch.setattr(module, name, counted)

    def take(self) -> set[str]:
        """Return what ran since the last time."""
        found = set(self.counts)
        self.counts.clear()
        return found


ALL = {"replay", "unit_times_s", "solve", "check_agreement"}


@pytest.mark.parametrize("updates", [False, True])
def test_the_second_compile_reads_all(
    updates: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is run, solved or checked; graph, costs, result, plan and program are the same."""
    counted = Counted(monkeypatch)

    def compile_anew() -> pmt.Step:
        step = own()
        options: dict[str, Any] = {"ram": "90%"} if updates else {}
        if updates:
            options["optimizer"] = torch.optim.AdamW(step[0].parameters())
        return compiled(step, tmp_path, **options)

    first = compile_anew()
    assert counted.take() == ALL
    second = compile_anew()
    assert counted.take() == set()
    assert second.compiled.trace.graph == first.compiled.trace.graph
    assert second.compiled.costs == first.compiled.costs
    assert second.result.schedule == first.result.schedule
    assert second.result.status == first.result.status
    assert second.result.objective_bound == pytest.approx(first.result.objective_bound)
    assert second.plan == first.plan
    assert second.source == first.source
    assert second.verify().equal
    assert any("read from the cache" in note for note in second.report()["costs"])


def test_without_a_folder_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`False` runs all of it each time."""
    monkeypatch.setenv("POETMODEL_CACHE", str(tmp_path))
    counted = Counted(monkeypatch)
    for _ in range(2):
        model, loss_fn, inputs = own()
        pmt.compile(model, loss_fn, inputs, ram="85%", cache=False)
        assert counted.take() == ALL
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"ram": "80%"}, {"recompute": False, "ram": "100%"}, {"minimize": "energy"}]
)
def test_what_depends_on_an_option_is_found_anew(
    options: Any, known: tuple[pmt.Step, Path], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The schedule is; what was measured of the same operations is read; a plan is checked once."""
    first, _ = known
    counted = Counted(monkeypatch)
    other = compiled(own(), folder, **options)
    checked = set() if other.source == first.source else {"check_agreement"}
    alike = kernels_told(other.compiled.trace) == kernels_told(first.compiled.trace)
    measured = set() if alike else {"unit_times_s"}
    assert counted.take() == {"solve"} | checked | measured


@pytest.mark.slow
def test_threads_and_code_are_part_of_the_key(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With others, all runs anew."""
    counted = Counted(monkeypatch)
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        compiled(own(), folder)
    finally:
        torch.set_num_threads(before)
    assert counted.take() == ALL
    monkeypatch.setattr(cache_module, "_own_code", lambda: "other")
    compiled(own(), folder)
    assert counted.take() == ALL


def test_an_edited_source_file_is_checked_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph is the same, and what is measured; but the code may do more than the graph says."""
    counted = Counted(monkeypatch)
    file_digest = known_steps._file_digest
    monkeypatch.setattr(
        known_steps, "_file_digest", lambda n: f"{file_digest(n)} {n == 'traced_models'}"
    )
    compiled(own(), folder)
    assert counted.take() == {"check_agreement"}


def test_what_is_in_no_file_is_always_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a notebook: nobody can tell whether it is the same code."""

    def step() -> tuple[Any, ...]:
        model, _, inputs = own()
        names: dict[str, Any] = {"__name__": "typed in"}
        exec("def loss(y, t): return (y - t).square().mean()", names)  # noqa: S102
        return model, names["loss"], inputs

    compiled(step(), tmp_path)
    counted = Counted(monkeypatch)
    compiled(step(), tmp_path)
    assert counted.take() == {"check_agreement"}


def test_other_constants_are_checked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph does not tell the values that it holds; its costs do not depend on them."""

    def step(value: float) -> tuple[Any, ...]:
        model, loss_fn, inputs = own()
        scaled = Through(
            lambda parts, x: parts[0](x) * torch.tensor([value, value, value])[0], model
        )
        return scaled, loss_fn, inputs

    compiled(step(1.5), tmp_path)
    counted = Counted(monkeypatch)
    compiled(step(2.5), tmp_path)
    assert counted.take() == {"check_agreement"}
    compiled(step(1.5), tmp_path)
    assert counted.take() == set()


def test_damaged_files_are_found_anew(known: tuple[pmt.Step, Path], folder: Path) -> None:
    """Of each kind, whether bytes are lost or the content is another: all is found, and kept."""
    first, _ = known
    for path in list(folder.iterdir()):
        path.write_bytes(path.read_bytes()[:-10])
    again = compiled(own(), folder)
    assert again.compiled.trace.graph == first.compiled.trace.graph
    cache = preparation.Cache(folder)
    for path in list(folder.iterdir()):
        kind, _, _ = path.name.partition("-")
        key = preparation_key(path)
        schedule = {"R": [[9**9, 0]], **dict.fromkeys(("kept", "stored", "M_in", "M_out"), ())}
        others = {"times_s": "x", "schedule": {**schedule, "resident": []}}
        cache.write(kind, key, [[0, []]] if kind == "step" else others)
    assert compiled(own(), folder).verify().equal


def preparation_key(path: Path) -> str:
    """Return the key of a file."""
    import json

    with path.open() as stream:
        return str(json.loads(stream.readline())["key"])


def test_more_time_goes_on_from_what_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A schedule that was not proved is where a solve with more time begins; less time takes it."""
    starts: list[Any] = []
    solve = preparation.solve

    def watched(problem: Any, **options: Any) -> Any:
        starts.append(options.get("start"))
        return preparation.replace(
            solve(problem, **options),
            status=Status.FEASIBLE,
            termination=Termination.TIME_LIMIT,
            objective_bound=None,
            overhead_bound_j=0.0,
        )

    monkeypatch.setattr(preparation, "solve", watched)
    options: dict[str, Any] = {"device": "rpi4b", "gap": 0.0, "ram": "85%"}
    first = compiled(own(), tmp_path, time_limit=20.0, **options)
    assert starts == [None]
    compiled(own(), tmp_path, time_limit=10.0, **options)
    assert len(starts) == 1
    compiled(own(), tmp_path, time_limit=40.0, **options)
    assert starts[1:] == [first.result.schedule]


def test_other_shapes_start_from_the_known_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is repaired for the sizes of the other batch, and valid there."""

    def step_of(batch: int) -> tuple[Any, ...]:
        torch.manual_seed(1)
        layers = [layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.Tanh())]
        inputs = torch.randn(batch, 16), torch.randn(batch, 16)
        return nn.Sequential(*layers), nn.functional.mse_loss, inputs

    compiled(step_of(batch=64), tmp_path)
    starts: list[Any] = []
    solve = preparation.solve

    def watched(problem: Any, **options: Any) -> Any:
        starts.append((problem, options["start"]))
        return solve(problem, **options)

    monkeypatch.setattr(preparation, "solve", watched)
    compiled(step_of(batch=80), tmp_path)
    ((problem, start),) = starts
    assert start is not None
    assert known_steps.accepted(problem, start) is not None
    assert any(k < t for t, k in start.R)


def test_sizes_that_depend_on_values_are_part_of_the_key(tmp_path: Path) -> None:
    """What a mask selects has no size in the operations of the graph."""

    class Selected(nn.Sequential):
        def forward(self, x: Any, y: Any, mask: Any) -> Any:
            return nn.functional.mse_loss(super().forward(x[mask]), y[mask])

    torch.manual_seed(1)
    model = Selected(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    x, y = torch.randn(400, 16), torch.randn(400, 16)
    peaks = []
    for count in (8, 300):
        mask = torch.arange(400) < count
        step = pmt.compile(model, None, (x, y, mask), ram="85%", cache=tmp_path)
        certificate = step.verify()
        assert certificate.equal
        assert certificate.within_budget
        peaks.append(step.compiled.keep_all_bytes)
    assert peaks[1] > 10 * peaks[0]


def test_values_that_have_no_form_are_not_kept(tmp_path: Path) -> None:
    """A graph with an object that nobody can tell from another is compiled, and not kept."""
    step = own()
    joint = known_steps.trace_of.__globals__["capture"](*step)
    node = next(n for n in joint.graph_module.graph.nodes if n.op == "call_function")
    node.kwargs = {**node.kwargs, "odd": object}
    known = known_steps.KnownStep(preparation.Cache(tmp_path), joint, step[1])
    assert known._cache.folder is None
