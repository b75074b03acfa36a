"""Caches of compilation: equal results, and no stale ones."""

import json
import os
import shutil
import tracemalloc
from pathlib import Path

import pytest
import torch

import poetmodel.torch as pmt
from kit.rotation import mark_seeds_except
from kit.traced_models import Residual
from poetmodel.result import Status, Termination
from poetmodel.torch import cache as cache_module
from poetmodel.torch import compile_cache
from poetmodel.torch import compiled as preparation
from poetmodel.torch.cache import Cache, default_folder, digest
from poetmodel.torch.runtime import profiling
from poetmodel.torch.runtime.convolutions import describe_divided_kernels
from poetmodel.torch.step import trace as step_trace

nn = torch.nn


def own(batch=2):
    """Return a step of blocks of convolutions with batch norm and dropout."""
    torch.manual_seed(1)
    layers = [*(Residual(8) for _ in range(2)), nn.Dropout(0.1), nn.Conv2d(8, 8, 1)]
    inputs = torch.randn(batch, 8, 24, 24), torch.randn(batch, 8, 24, 24)
    return nn.Sequential(*layers), nn.functional.mse_loss, inputs


def compiled(step, folder, **options):
    """Compile a step for 85 % of the memory, with the cache in a folder."""
    model, loss_fn, inputs = step
    return pmt.compile(model, loss_fn, inputs, cache=folder, **({"ram": "85%"} | options))


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """Return the step, and a folder in which it is known."""
    folder = tmp_path_factory.mktemp("known")
    return compiled(own(), folder), folder


@pytest.fixture
def folder(known, tmp_path):
    """Return a folder of the test's own in which the step is known."""
    return Path(shutil.copytree(known[1], tmp_path / "known"))


class Counted:
    """Counts the runs and solves of a compile."""

    def __init__(self, monkeypatch):
        self.counts = {}
        for module, name in (
            (step_trace, "profile_on_inputs"),
            (profiling, "measure_operation_times"),
            (preparation, "solve"),
        ):
            self._count(monkeypatch, module, name, getattr(module, name))

    def _count(self, patch, module, name, function):
        def counted(*given, **options):
            self.counts[name] = self.counts.get(name, 0) + 1
            return function(*given, **options)

        patch.setattr(module, name, counted)

    def take(self):
        """Return the calls since the last time."""
        found = set(self.counts)
        self.counts.clear()
        return found


ALL = {"profile_on_inputs", "measure_operation_times", "solve"}


@pytest.mark.parametrize("updates", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_second_compile_reads_all(updates, tmp_path, monkeypatch):
    """No measurement and no solve; graph, costs, result, plan and program are the same.

    `False` runs all of it each time, and stores nothing.
    """
    monkeypatch.setenv("POETMODEL_CACHE", str(tmp_path / "unused"))
    counted = Counted(monkeypatch)

    def compile_anew():
        step = own()
        options = {"ram": "90%"} if updates else {}
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
    compiled(own(), False)
    assert counted.take() == ALL
    assert not (tmp_path / "unused").exists()


OTHERS = {
    # The schedule is found anew; what was measured of the same operations is read.
    "ram": {"solve"},
    "recompute": {"solve"},
    "minimize": {"solve"},
    "threads": ALL,
    "code": ALL,
}


@pytest.mark.parametrize("case", mark_seeds_except(OTHERS, ["code", "ram"]))
def test_what_depends_on_another_thing_is_found_anew(case, known, folder, monkeypatch):
    """An option, the threads, or our code."""
    first, _ = known
    options = {"ram": {"ram": "80%"}, "minimize": {"minimize": "energy"}}.get(case, {})
    if case == "recompute":
        options = {"recompute": False, "ram": "100%"}
    if case == "code":
        monkeypatch.setattr(cache_module, "_code_digest", lambda: "other")
    counted, before = Counted(monkeypatch), torch.get_num_threads()
    torch.set_num_threads(before + (case == "threads"))
    try:
        other = compiled(own(), folder, **options)
    finally:
        torch.set_num_threads(before)
    expected = set(OTHERS[case])
    if options:
        alike = describe_divided_kernels(other.compiled.trace) == describe_divided_kernels(
            first.compiled.trace
        )
        expected |= set() if alike else {"measure_operation_times"}
    assert counted.take() == expected


def test_damaged_files_are_found_anew(known, folder):
    """Of each kind, whether bytes are lost or the content is another: all is found, and kept."""
    first, _ = known
    for path in list(folder.iterdir()):
        path.write_bytes(path.read_bytes()[:-10])
    again = compiled(own(), folder)
    assert again.compiled.trace.graph == first.compiled.trace.graph
    cache = preparation.Cache(folder)
    for path in list(folder.iterdir()):
        kind, _, _ = path.name.partition("-")
        key = json.loads(path.read_text(encoding="utf-8").splitlines()[0])["key"]
        schedule = {"R": [[9**9, 0]], **dict.fromkeys(("kept", "stored", "M_in", "M_out"), ())}
        others = {"times_s": "x", "schedule": {**schedule, "resident": []}}
        cache.write(kind, key, [[0, []]] if kind == "profiles" else others)
    assert compiled(own(), folder).verify().equal


def test_a_profile_with_an_unknown_type_is_found_anew(known, folder):
    """PyTorch has the name, but it is no type of tensors."""
    first, _ = known
    cache = preparation.Cache(folder)
    (path,) = folder.glob("profiles-*")
    key = json.loads(path.read_text(encoding="utf-8").splitlines()[0])["key"]
    content = json.dumps(cache.read("profiles", key))
    changed = content.replace('"float32"', '"nn"')
    assert changed != content
    cache.write("profiles", key, json.loads(changed))
    assert compiled(own(), folder).compiled.trace.graph == first.compiled.trace.graph
    assert '"nn"' not in json.dumps(cache.read("profiles", key))


@pytest.mark.parametrize("name", ["build_trace", "build_profile"])
def test_faults_of_ours_are_no_damage(name, folder, monkeypatch):
    """Faults of a plan or its costs are reported, not computed again silently."""

    def wrong(*_, **__):
        raise AttributeError("not a damaged file")

    monkeypatch.setattr(compile_cache, name, wrong)
    with pytest.raises(AttributeError, match="not a damaged file"):
        compiled(own(), folder)


@pytest.mark.slow
def test_more_time_goes_on_from_what_is_known(tmp_path, monkeypatch):
    """A longer solve begins with the unproven schedule; with less time, the cached one is used."""
    starts = []
    solve = preparation.solve

    def watched(problem, **options):
        starts.append(options.get("start"))
        return preparation.replace(
            solve(problem, **options), status=Status.FEASIBLE, termination=Termination.TIME_LIMIT,
            objective_bound=None, overhead_bound_j=0.0,
        )  # fmt: skip

    monkeypatch.setattr(preparation, "solve", watched)
    options = {"device": "rpi4b", "gap": 0.0, "ram": "85%"}
    first = compiled(own(), tmp_path, time_limit=20.0, **options)
    assert starts == [None]
    compiled(own(), tmp_path, time_limit=10.0, **options)
    assert len(starts) == 1
    compiled(own(), tmp_path, time_limit=40.0, **options)
    assert starts[1:] == [first.result.schedule]


@pytest.mark.slow
def test_sizes_that_depend_on_values_are_part_of_the_key(tmp_path):
    """Operations of the graph do not state the size of a masked selection."""

    class Selected(nn.Sequential):
        def forward(self, x, y, mask):
            return nn.functional.mse_loss(super().forward(x[mask]), y[mask])

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


def test_values_that_have_no_form_are_not_kept(tmp_path):
    """A graph with an object that cannot be compared is compiled, and not cached."""
    step = own()
    joint = compile_cache.build_trace.__globals__["capture"](*step)
    node = next(n for n in joint.graph_module.graph.nodes if n.op == "call_function")
    node.kwargs = {**node.kwargs, "odd": object}
    known = compile_cache.CachedStep(preparation.Cache(tmp_path), joint)
    assert known._cache.folder is None


# -- the folder: whole files or none, whoever writes at the same time ------------------------------
KEY = digest("a", 1)
CONTENT = {"times_s": [0.1, 1e-9], "name": "é", "none": None}


def written(folder):
    """Return a cache that holds one value, and its file."""
    cache = Cache(folder / "made" / "for it")
    cache.write("costs", KEY, CONTENT)
    (path,) = (folder / "made" / "for it").iterdir()
    return cache, path


def test_what_was_written_is_read(tmp_path):
    """By kind and key; other files are not read, nor a copy with the name of another key."""
    cache, path = written(tmp_path)
    assert cache.read("costs", KEY) == CONTENT
    assert cache.read("step", KEY) is None
    assert cache.read("costs", digest("a", 2)) is None
    assert digest("a", 1) != digest("a", "1")
    other = digest("other")
    path.rename(path.with_name(f"costs-{other[:40]}.json"))
    assert cache.read("costs", other) is None


def test_reading_takes_the_memory_of_the_file(tmp_path):
    """A few hundred bytes are read into no buffer of the largest file that is read."""
    cache, path = written(tmp_path)
    tracemalloc.start()
    try:
        assert cache.read("costs", KEY) == CONTENT
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2**20 + 10 * path.stat().st_size


@pytest.mark.parametrize("place", [0, 20, 150, -30, -1])
def test_a_damaged_file_is_not_there(place, tmp_path):
    """Whichever byte is another, or where the end is missing; the next write replaces it."""
    cache, path = written(tmp_path)
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[place] ^= 1
    for content in (bytes(damaged), whole[:place], b"", b"[" * 100_000):
        path.write_bytes(content)
        assert cache.read("costs", KEY) is None
    cache.write("costs", KEY, CONTENT)
    assert cache.read("costs", KEY) == CONTENT


def test_no_folder_keeps_nothing(tmp_path, monkeypatch):
    """Beyond the object: `False` and an empty variable; one that cannot be made is no error.

    The folder is that of the variable, else it is below the user's cache.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POETMODEL_CACHE", "")
    (tmp_path / "file").write_text("")
    for folder in (False, True, tmp_path / "file" / "below"):
        cache = Cache.from_option(folder)
        cache.write("costs", KEY, CONTENT)
        assert cache.read("costs", KEY) == (None if cache.folder else CONTENT)
        assert Cache.from_option(folder).read("costs", KEY) is None
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    monkeypatch.setenv("POETMODEL_CACHE", "/some/where")
    assert Cache.from_option(True).folder == Path("/some/where")
    monkeypatch.delenv("POETMODEL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert default_folder() == Path("/caches/poetmodel")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_folder() == Path.home() / ".cache" / "poetmodel"


def test_the_oldest_files_go(tmp_path, monkeypatch):
    """Recently read files stay, and so do foreign files, with any names."""
    monkeypatch.setattr(cache_module, "MAX_FILES", 3)
    theirs = [tmp_path / name for name in ("run-1.json", "step-of-mine.json", "a-b.txt")]
    for path in theirs:
        path.write_text("{}")
    cache = Cache(tmp_path)
    for number in range(3):
        cache.write("step", digest(number), number)
        os.utime(cache._path("step", digest(number)), (number, number))
    assert cache.read("step", digest(0)) == 0
    cache.write("step", digest(3), 3)
    assert [cache.read("step", digest(number)) for number in range(4)] == [0, None, 2, 3]
    assert len(list(tmp_path.iterdir())) == len(theirs) + 3
    assert all(path.exists() for path in theirs)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_processes_share_a_folder(tmp_path):
    """While several write the same key, a reader finds one of their values, whole."""
    cache = Cache(tmp_path)
    cache.write("costs", "key", [9] * 5000)
    writers = []
    for number in range(2):
        writers.append(os.fork())
        if writers[-1] == 0:
            try:
                for _ in range(15):
                    Cache.from_option(tmp_path).write("costs", "key", [number] * 5000)
                os._exit(0)
            finally:
                os._exit(1)
    left = set(writers)
    while left:
        assert cache.read("costs", "key") in ([0] * 5000, [1] * 5000, [9] * 5000)
        for writer in tuple(left):
            done, status = os.waitpid(writer, os.WNOHANG)
            assert status == 0
            left.discard(done)
    assert cache.read("costs", "key")[0] in (0, 1)
