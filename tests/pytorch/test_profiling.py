"""Profiles: times of operations and pages, and power."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from kit.traced_models import residual, rows, traced_residual  # noqa: E402
from poetmodel.device import Costs, Device  # noqa: E402
from poetmodel.device.hardware import Compute  # noqa: E402
from poetmodel.device.io import save_profile  # noqa: E402
from poetmodel.errors import InputError  # noqa: E402
from poetmodel.problem import Problem  # noqa: E402
from poetmodel.torch import measure, trace  # noqa: E402
from poetmodel.torch.runtime import profiling  # noqa: E402
from poetmodel.torch.runtime.profiling import (  # noqa: E402
    Power,
    fitted,
    measure_paging,
    measured_power,
    power_of,
)

if TYPE_CHECKING:
    from pathlib import Path


nn = torch.nn
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


def test_time_is_bounded(tmp_path: Path) -> None:
    """When the time is used up no further step begins, but two are timed in any case."""
    traced = traced_residual()
    assert measure(traced, folder=tmp_path, repeats=5, most_s=0.0).repeats == 2
    assert measure(traced, folder=tmp_path, repeats=4).repeats == 4
    assert measure(traced, folder=tmp_path, repeats=1).repeats == 1


@pytest.mark.parametrize(
    ("steps_s", "spread", "doubtful"), [((2, 3, 4), 1, True), ((2, 2.1), 0.05, False)]
)
def test_the_spread_of_the_steps_is_told(
    steps_s: tuple[float, ...], spread: float, doubtful: object
) -> None:
    """How far the slowest step is from the fastest; where that is much, what to do about it."""
    found = measure(traced_residual(), folder=None, repeats=1)
    found = dataclasses.replace(found, steps_s=steps_s)
    assert found.spread_ratio == pytest.approx(spread)
    assert f"a spread of {spread:.0%}" in found.notes[0]
    assert any("measure again" in note for note in found.notes) is doubtful


def test_without_pages_no_folder_is_needed() -> None:
    """Costs have no storage then, and nothing is said of pages."""
    profile = measure(traced_residual(), folder=None, repeats=1)
    assert profile.costs.pages is None
    assert not any(note.startswith("page") for note in profile.notes)


def test_notes_say_how_it_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeats, threads, folder, and where energies come from are said."""
    traced = traced_residual()
    monkeypatch.setattr(profiling, "measured_power", lambda _: None)
    notes = measure(traced, folder=tmp_path, repeats=2).notes
    assert notes[0].startswith("compute times: of each operation the least of 2 steps, 1 thread")
    assert any(note.startswith("page times: ") and str(tmp_path) in note for note in notes)
    assert "a nominal 1 W" in notes[-1]


def test_counters_are_read_while_the_step_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where counters can be read, their power makes the energies."""
    power = Power(compute_w=5.0, page_in_w=6.0, page_out_w=7.0, source="counters")
    monkeypatch.setattr(profiling, "measured_power", lambda work: work() or power)
    profile = measure(traced_residual(), folder=tmp_path, repeats=1)
    cost = profile.costs.compute["0/convolution"]
    assert cost.energy_j == 5.0 * cost.time_s
    assert profile.notes[-1] == "energies: counters"


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
        ({"repeats": "x"}, "repeats: .*got 'x'"),
        ({"threads": -1}, "threads: .*got -1"),
    ],
)
def test_measurements_that_make_no_sense_are_refused(options: Any, words: str) -> None:
    """Each with a sentence."""
    with pytest.raises(InputError, match=words):
        measure(traced_residual(), **options)
    with pytest.raises(InputError, match="expected what `trace` returns, got 'x'"):
        measure("x")


def test_least_time_counts_and_views_belong_to_their_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a clock that runs slower from step to step, the last step's times come out."""
    traced = trace(*rows(nn.Linear(4, 4)), measure_workspace=False)
    calls = sum(node.op == "call_function" for node in traced.joint.graph_module.graph.nodes)
    reads = 0

    def clock() -> float:
        nonlocal reads
        reads += 1
        step, half = divmod(reads - 1, 2 * calls)
        return float(half % 2) * (10.0 - step)

    monkeypatch.setattr(profiling, "thread_time", clock)
    times_s, steps = profiling.unit_times_s(traced.joint, traced.parts, repeats=3)
    assert steps == (sum(times_s) * 10 / 8, sum(times_s) * 9 / 8, sum(times_s))
    assert times_s == tuple(8.0 * (1 + len(u.reads.views)) for u in traced.parts.units)


def test_threads_are_put_back() -> None:
    """Measuring with some threads leaves the setting of the process as it was."""
    traced = traced_residual()
    before = torch.get_num_threads()
    times_s, _ = profiling.unit_times_s(traced.joint, traced.parts, repeats=1, threads=before + 1)
    assert torch.get_num_threads() == before
    assert len(times_s) == len(traced.graph.nodes)
    assert min(times_s) > 0


SIZES = (4096, 65536)


def test_fit_is_exact_on_a_line() -> None:
    """Latency and rate come out as they went in, over four decades."""
    sizes = [10**k for k in range(3, 8)]
    way = fitted(sizes, [2e-4 + size / 5e7 for size in sizes])
    assert way.latency_s == pytest.approx(2e-4, rel=1e-6)
    assert way.bytes_per_s == pytest.approx(5e7, rel=1e-6)
    assert way.time_s(5 * 10**7) == pytest.approx(1.0002, rel=1e-6)


def test_fit_has_no_negative_latency() -> None:
    """Where a line would begin below zero, the latency is zero and the rate fits what is left."""
    way = fitted([1000, 2000], [0.001, 0.003])
    assert way.latency_s == 0
    assert 2000 / 0.003 < way.bytes_per_s < 1000 / 0.001


def test_measuring_leaves_nothing_behind(tmp_path: Path) -> None:
    """Both directions get a rate, and the folder is empty afterwards."""
    found = measure_paging(tmp_path, repeats=1, sizes_bytes=SIZES)
    assert found.page_in.bytes_per_s > 0
    assert found.page_out.bytes_per_s > 0
    assert found.folder == str(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_every_page_is_synced_dropped_and_read_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short writes and reads go on, and every timed read comes after a sync and a drop."""
    calls: list[str] = []
    write, read = os.pwrite, os.preadv

    def short_write(descriptor: int, page: Any, offset: int) -> int:
        calls.append("write")
        return write(descriptor, page[:40000], offset)

    def short_read(descriptor: int, pages: list[Any], offset: int, flags: int = 0) -> int:
        calls.append("probe" if flags else "read")
        return read(descriptor, [pages[0][:40000]], offset, flags)

    monkeypatch.setattr(os, "pwrite", short_write)
    monkeypatch.setattr(os, "preadv", short_read)
    monkeypatch.setattr(os, "fdatasync", lambda _: calls.append("sync"))
    monkeypatch.setattr(os, "posix_fadvise", lambda *_: calls.append("drop"))
    measure_paging(tmp_path, repeats=1, sizes_bytes=SIZES)
    assert calls == [
        "write", "sync",
        "write", "sync", "drop", "read",
        "write", "write", "sync", "drop", "read", "read",
        "write", "sync", "drop", "probe",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "cold"),
    [(BlockingIOError(), True), (OSError(95, "Operation not supported"), False), (4096, False)],
)
def test_a_full_cache_is_noticed(
    answer: Any, cold: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that need not wait means that the cache was not empty, and none means no proof."""
    read = os.preadv

    def probe(descriptor: int, pages: list[Any], offset: int, flags: int = 0) -> int:
        if not flags:
            return read(descriptor, pages, offset)
        if isinstance(answer, OSError):
            raise answer
        return int(answer)

    monkeypatch.setattr(os, "preadv", probe)
    assert measure_paging(tmp_path, repeats=1, sizes_bytes=SIZES).cold is cold


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    """A missing folder, or one where nothing fits, gives a sentence with its name."""
    with pytest.raises(InputError, match="nowhere: pages cannot be timed here"):
        measure_paging(tmp_path / "nowhere")


@pytest.mark.parametrize("room_bytes", [0, 100, 10_000])
def test_a_full_disk_is_named(
    room_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full, or soon is, gives a sentence that says how much must be free."""
    pwrite = os.pwrite

    def nearly_full(descriptor: int, memory: Any, offset: int) -> int:
        if offset >= room_bytes:
            raise OSError(28, "No space left on device")
        return pwrite(descriptor, bytes(memory)[: room_bytes - offset], offset)

    monkeypatch.setattr(os, "pwrite", nearly_full)
    with pytest.raises(InputError, match=r"No space left on device.*64\.00 KiB free"):
        measure_paging(tmp_path, sizes_bytes=SIZES)


def counter(folder: Path, name: str, value: int, largest: int | None = None) -> Path:
    """Make the folder of an energy counter; return its file."""
    package = folder / name
    package.mkdir()
    (package / "energy_uj").write_text(f"{value}\n")
    if largest is not None:
        (package / "max_energy_range_uj").write_text(f"{largest}\n")
    return package / "energy_uj"


def two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the clock of the module go on by 2 s from one look at it to the next."""
    moments = iter((10.0, 12.0))
    monkeypatch.setattr(profiling, "perf_counter", lambda: next(moments))


def test_counters_of_all_packages_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Energy of all packages over time; parts of a package are not counted again."""
    first = counter(tmp_path, "intel-rapl:0", 1_000_000)
    second = counter(tmp_path, "intel-rapl:1", 0)
    part = counter(tmp_path, "intel-rapl:0:0", 0)
    two_seconds(monkeypatch)

    def work() -> None:
        first.write_text("4000000")
        second.write_text("1000000")
        part.write_text("9000000")

    power = measured_power(work, folder=tmp_path)
    assert power is not None
    assert (power.compute_w, power.page_in_w, power.page_out_w) == (2.0, 2.0, 2.0)
    assert power.source == "RAPL counters: 2.0 W for 2 package(s), idle power included"


def test_a_counter_that_begins_again_is_no_negative_energy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A counter that passed its largest value has gone on, not back."""
    file = counter(tmp_path, "intel-rapl:0", 5_000_000, largest=5_999_999)
    two_seconds(monkeypatch)
    power = measured_power(lambda: file.write_text("3000000") and None, folder=tmp_path)
    assert power is not None
    assert power.compute_w == 2.0


def test_no_counter_is_no_power(tmp_path: Path) -> None:
    """Where nothing can be read, nothing is made up."""
    (tmp_path / "intel-rapl:0").mkdir()
    assert measured_power(lambda: None, folder=tmp_path) is None
    assert measured_power(lambda: None, folder=tmp_path / "nowhere") is None


def test_power_of_a_device_is_its_own() -> None:
    """A device's figures are taken as they are, and its name is said."""
    power = power_of(Device.load("rpi4b"))
    assert (power.compute_w, power.page_in_w, power.page_out_w) == (3.0, 0.15, 0.15)
    assert power.source == "the power figures of device rpi4b"


def test_power_of_a_device_with_an_efficiency() -> None:
    """Without a power it is the rate over the efficiency; without storage pages cost the same."""
    device = dataclasses.replace(
        Device.load("rpi4b"), compute=Compute(flops_per_s=8e9, flops_per_j=2e9), storage=None
    )
    power = power_of(device)
    assert (power.compute_w, power.page_in_w, power.page_out_w) == (4.0, 4.0, 4.0)
