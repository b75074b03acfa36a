"""Profiles: times of operations and pages, and the kernels of convolutions."""

import dataclasses
import os

import pytest
import torch

import poetmodel.torch as pmt
from kit.eager_steps import find_differences
from kit.traced_models import residual, row_step, trace_residual
from poetmodel.device import Costs
from poetmodel.errors import InputError
from poetmodel.problem import Problem
from poetmodel.torch import measure, trace
from poetmodel.torch.graph.operators import KERNEL_KEY
from poetmodel.torch.runtime import profiling
from poetmodel.torch.runtime.convolutions import (
    DividedConvolution,
    DividedConvolutionBackward,
    DividedNormBackward,
    Division,
    choose_divisions,
    describe_divided_kernels,
    divide_convolutions,
    find_min_workspace_kernel,
)
from poetmodel.torch.state.paging import fit_transfer_time, measure_paging
from poetmodel.torch.step.scheduled import keep_all_bytes, min_budget_bytes

nn = torch.nn
aten = torch.ops.aten


def test_profile_fits_its_graph(tmp_path):
    """Saved, read again, the costs make a problem with the graph."""
    traced = trace(*residual())
    profile = measure(traced, folder=tmp_path, repeats=1)
    profile.costs.save(tmp_path / "net.csv")
    costs = Costs.load(tmp_path / "net.csv")
    assert costs == profile.costs
    problem = Problem(traced.graph, costs, ram="100%")
    assert problem.pass_time_s > 0
    for cost in costs.compute.values():
        assert cost.energy_j == cost.time_s
    for page in (costs.pages or {}).values():
        assert page.page_in.energy_j == page.page_in.time_s


@pytest.mark.parametrize(
    ("steps_s", "spread", "doubtful"), [((2, 3, 4), 1, True), ((2, 2.1), 0.05, False)]
)
def test_the_spread_of_the_steps_is_told(steps_s, spread, doubtful):
    """The slowest step relative to the fastest; if that is large, with a recommendation."""
    found = measure(trace_residual(), folder=None, repeats=1)
    found = dataclasses.replace(found, steps_s=steps_s)
    assert found.spread_ratio == pytest.approx(spread)
    assert f"a spread of {spread:.0%}" in found.notes[0]
    assert any("measure again" in note for note in found.notes) is doubtful


def test_notes_say_how_it_was_measured(tmp_path):
    """Repeats, threads, folder, and the source of energies are noted.

    After the time limit, no further step begins, but two are timed in any case.
    """
    traced = trace_residual()
    assert measure(traced, folder=tmp_path, repeats=5, max_s=0.0).repeats == 2
    assert measure(traced, folder=tmp_path, repeats=4).repeats == 4
    notes = measure(traced, folder=tmp_path, repeats=2).notes
    assert notes[0].startswith("compute times: of each operation the minimum of 2 steps, 1 thread")
    assert any(note.startswith("page times: ") and str(tmp_path) in note for note in notes)
    assert "a nominal 1 W" in notes[-1]
    profile = measure(traced, folder=None, repeats=1)
    assert profile.costs.pages is None
    assert not any(note.startswith("page") for note in profile.notes)
    assert profile.repeats == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"repeats": 0}, "repeats: expected a whole number from 1, got 0"),
        ({"repeats": "x"}, "repeats: .*got 'x'"),
        ({"threads": -1}, "threads: .*got -1"),
    ],
)
def test_measurements_that_make_no_sense_are_refused(options, words):
    """Each with a sentence."""
    with pytest.raises(InputError, match=words):
        measure(trace_residual(), **options)
    with pytest.raises(InputError, match="expected the result of `trace`, got 'x'"):
        measure("x")
    inputs = (torch.randn(3, 4, device="meta"), torch.randn(3, 4, device="meta"))
    traced = trace(torch.nn.Linear(4, 4, device="meta"), lambda y, t: (y * t).sum(), inputs)
    with pytest.raises(InputError, match="parameters are on meta; estimate its costs"):
        measure(traced, folder=None)


def test_least_time_counts_and_views_belong_to_their_reader(monkeypatch):
    """With a clock that slows down from step to step, the last step's times are returned.

    A measurement with some threads does not change the setting of the process.
    """
    before = torch.get_num_threads()
    profiling.measure_operation_times(
        (own := trace_residual()).joint, own.step_graph, repeats=1, threads=before + 1
    )
    assert torch.get_num_threads() == before
    traced = trace(*row_step(nn.Linear(4, 4)), measure_workspace=False)
    calls = sum(node.op == "call_function" for node in traced.joint.graph_module.graph.nodes)
    reads = 0

    def clock():
        nonlocal reads
        reads += 1
        step, half = divmod(reads - 1, 2 * calls)
        return float(half % 2) * (10.0 - step)

    monkeypatch.setattr(profiling, "thread_time", clock)
    times_s, steps = profiling.measure_operation_times(traced.joint, traced.step_graph, repeats=3)
    assert steps == (sum(times_s) * 10 / 8, sum(times_s) * 9 / 8, sum(times_s))
    assert times_s == tuple(8.0 * (1 + len(u.reads.views)) for u in traced.step_graph.operations)


SIZES = (4096, 65536)


def test_fit_is_exact_on_a_line(tmp_path):
    """Latency and rate are the given ones, over four decades; no latency is negative.

    Both directions of a folder have a rate, and it is empty afterwards.
    """
    sizes = [10**k for k in range(3, 8)]
    way = fit_transfer_time(sizes, [2e-4 + size / 5e7 for size in sizes])
    assert way.latency_s == pytest.approx(2e-4, rel=1e-6)
    assert way.bytes_per_s == pytest.approx(5e7, rel=1e-6)
    assert way.time_s(5 * 10**7) == pytest.approx(1.0002, rel=1e-6)
    way = fit_transfer_time([1000, 2000], [0.001, 0.003])
    assert way.latency_s == 0
    assert 2000 / 0.003 < way.bytes_per_s < 1000 / 0.001
    found = measure_paging(tmp_path, repeats=1, sizes_bytes=SIZES)
    assert found.page_in.bytes_per_s > 0
    assert found.page_out.bytes_per_s > 0
    assert found.folder == str(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_every_page_is_synced_dropped_and_read_in_full(tmp_path, monkeypatch):
    """Short writes and reads are continued, and each timed read follows a sync and a drop."""
    calls = []
    write, read = os.pwrite, os.preadv

    def short_write(descriptor, page, offset):
        calls.append("write")
        return write(descriptor, page[:40000], offset)

    def short_read(descriptor, pages, offset, flags=0):
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
def test_a_full_cache_is_noticed(answer, cold, tmp_path, monkeypatch):
    """A read that need not wait means that the cache was not empty, and none means no proof."""
    read = os.preadv

    def probe(descriptor, pages, offset, flags=0):
        if not flags:
            return read(descriptor, pages, offset)
        if isinstance(answer, OSError):
            raise answer
        return int(answer)

    monkeypatch.setattr(os, "preadv", probe)
    assert measure_paging(tmp_path, repeats=1, sizes_bytes=SIZES).cold is cold


@pytest.mark.parametrize("room_bytes", [0, 100, 10_000])
def test_a_full_disk_is_named(room_bytes, tmp_path, monkeypatch):
    """An error for a full disk states how much must be free.

    So does one for a missing folder.
    """
    with pytest.raises(InputError, match="nowhere: pages cannot be timed here"):
        measure_paging(tmp_path / "nowhere")
    pwrite = os.pwrite

    def nearly_full(descriptor, memory, offset):
        if offset >= room_bytes:
            raise OSError(28, "No space left on device")
        return pwrite(descriptor, bytes(memory)[: room_bytes - offset], offset)

    monkeypatch.setattr(os, "pwrite", nearly_full)
    with pytest.raises(InputError, match=r"No space left on device.*64\.00 KiB free"):
        measure_paging(tmp_path, sizes_bytes=SIZES)


# -- kernels of convolutions -----------------------------------------------------------------------
CASES = {
    "plain": nn.Conv2d(32, 48, 3, padding=1), "strided": nn.Conv2d(32, 64, 3, stride=2, bias=False),
    "odd": nn.Conv2d(5, 7, 3, dilation=2), "line": nn.Conv1d(32, 32, 5, padding=2),
    "depthwise": nn.Conv2d(32, 64, 3, groups=32), "grouped": nn.Conv2d(32, 64, 1, groups=4),
    "transposed": nn.ConvTranspose2d(32, 48, 2, stride=2),
}  # fmt: skip


def operands(layer):
    """Return input, gradient of the output, and further operands of PyTorch's operators."""
    torch.manual_seed(1)
    sizes = (6,) * (layer.weight.ndim - 2)
    x = torch.randn(4, layer.in_channels, *sizes)
    padding = layer.output_padding if layer.transposed else (0,) * len(sizes)
    how = [layer.stride, layer.padding, layer.dilation, layer.transposed, padding, layer.groups]
    with torch.no_grad():
        return x, torch.randn_like(layer(x)), [list(h) if isinstance(h, tuple) else h for h in how]


def divisions(layer, kinds):
    """Return ways to divide a layer, those that its groups allow."""
    if layer.groups > 1:
        kinds = [kind for kind in ("batch", "groups") if kind in {*kinds, "groups"}]
    return [
        Division(dimension=kind, count=count, groups=layer.groups, transposed=layer.transposed)
        for kind in kinds
        for count in (2, 3)
    ]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mask", [[True, True, True], [True, False, False], [False, True, False]])
def test_parts_of_a_convolution_are_the_whole(case, mask):
    """Whatever is divided, up to the rounding of sums in another order.

    Gradients of the input are by images or channels, those of weight and bias by channels.
    """
    layer = CASES[case]
    x, dy, how = operands(layer)
    with torch.no_grad():
        whole = layer(x)
        for division in divisions(layer, ("batch", "out")):
            kernel = DividedConvolution((division,), torch.empty_like(whole, device="meta"))
            torch.testing.assert_close(kernel(x, layer.weight, layer.bias, *how), whole)
    arguments = (dy, x, layer.weight.detach(), [dy.shape[1]], *how, mask)
    whole = aten.convolution_backward(*arguments)
    of_input = [None, *divisions(layer, ("batch", "in"))]
    of_weight = [d for d in divisions(layer, ("out", "in")) if d.dimension != "batch"]
    for k, one in enumerate(of_input):
        found = DividedConvolutionBackward((one, of_weight[k % len(of_weight)]))(*arguments)
        for part, expected, wanted in zip(found, whole, mask, strict=True):
            assert (part is not None) == wanted
            if wanted:
                torch.testing.assert_close(part, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
def test_parts_of_the_gradients_of_a_norm_are_the_whole(*, train, scaled):
    """In either mode, with and without a weight."""
    x, dy = torch.randn(4, 7, 5, 5), torch.randn(4, 7, 5, 5)
    mean, deviation = x.mean((0, 2, 3)), 1 / x.std((0, 2, 3))
    weight = torch.rand(7) if scaled else None
    arguments = (dy, x, weight, mean, deviation, mean, deviation, train, 1e-5, [True, scaled, True])
    whole = aten.native_batch_norm_backward(*arguments)
    for count in (2, 3, 7):
        found = DividedNormBackward((Division(dimension="channels", count=count),))(*arguments)
        for part, expected in zip(found, whole, strict=True):
            assert (part is None) == (expected is None)
            if part is not None:
                torch.testing.assert_close(part, expected, rtol=1e-4, atol=1e-4)


def test_a_kernel_with_other_bits_is_not_taken():
    """Even where it needs less memory."""
    x = torch.randn(1000)

    def whole(x):
        return (x + 1) + (x + 2)

    def less(x):
        return (x + 1).add_(x).add_(2)

    def same(x):
        return (x + 1).add_(x + 2)

    assert find_min_workspace_kernel([less], whole, [x], 0) is None
    found = find_min_workspace_kernel([less, same], whole, [x], 0)
    assert found is not None
    assert found[0] is same
    assert find_min_workspace_kernel([same], whole, [x], 1 << 20) is None


def wide():
    """Return a network whose weights are larger than its images."""
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(16, 192, 3, padding=1), nn.ReLU(), nn.Conv2d(192, 192, 3, padding=1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(192, 4),
    )  # fmt: skip
    inputs = (torch.randn(4, 16, 4, 4), torch.randint(0, 4, (4,)))
    return model, nn.functional.cross_entropy, inputs


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN's workspaces")
def test_a_budget_below_whole_convolutions_is_kept():
    """Where no schedule of whole convolutions fits, one of parts runs, and is eager's."""
    own = wide()
    traced = pmt.trace(*own)
    assert choose_divisions(traced, budget_bytes=keep_all_bytes(traced)) == []  # there is room
    found = choose_divisions(traced, budget_bytes=keep_all_bytes(traced) // 3)
    assert found
    divided = divide_convolutions(traced, found)
    assert sum(KERNEL_KEY in unit.node.meta for unit in divided.step_graph.operations) == len(found)
    least = min_budget_bytes(divided)
    assert least < min_budget_bytes(traced)
    step = pmt.compile(*own, ram=(least + min_budget_bytes(traced)) // 2, device="rpi4b")
    assert find_differences(step, *own) == []
    assert step.verify().heap_peak_bytes <= step.budget_bytes
    assert any("executed in pieces" in note for note in step.compiled.notes)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN's workspaces")
def test_each_of_equal_convolutions_is_divided_for_its_own_tensors():
    """The first, which reads the batch, leaves more of the budget to its workspace than the rest.

    The tensors of the rest alone exceed the allowed fraction, at 60 % as at 30 % of keep-all.
    """
    layers = (nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()) for _ in range(3))
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 32 * 32, 4))
    inputs = (torch.randn(16, 16, 32, 32), torch.randint(0, 4, (16,)))
    traced = pmt.trace(model, nn.functional.cross_entropy, inputs)
    first, *rest = (
        unit.index
        for unit in traced.step_graph.operations
        if unit.node.target is aten.convolution.default
    )
    smallest, found = (
        {one.operation: one for one in choose_divisions(traced, budget_bytes=budget_bytes)}
        for budget_bytes in (keep_all_bytes(traced) * 3 // 10, keep_all_bytes(traced) * 6 // 10)
    )
    assert found[first].workspace_bytes > smallest[first].workspace_bytes
    assert [found[k] for k in rest] == [smallest[k] for k in rest]


@pytest.mark.slow
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN's workspaces")
def test_convolutions_of_another_layout_change_no_division():
    """Their gradients need less workspace in pieces than contiguous ones of equal shape."""

    class Layouts(nn.Module):
        def __init__(self, last_layout):
            super().__init__()
            self.convs = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(3))
            self.last = nn.Linear(16 * 32 * 32, 4)
            self.last_layout = last_layout

        def forward(self, x):
            for conv in self.convs[:2]:
                x = torch.relu(conv(x))
            x = x.contiguous(memory_format=self.last_layout)
            return self.last(self.convs[2](x).flatten(1))

    inputs = (torch.randn(16, 16, 32, 32), torch.randint(0, 4, (16,)))
    found = []
    for last_layout in (torch.contiguous_format, torch.channels_last):
        traced = pmt.trace(Layouts(last_layout), nn.functional.cross_entropy, inputs)
        divided_ops = choose_divisions(traced, budget_bytes=keep_all_bytes(traced) * 3 // 10)
        operations = traced.step_graph.operations
        found.append({operations[one.operation].name: one for one in divided_ops})
    plain, mixed = found
    second = "convs.1/convolution_backward"
    assert mixed[second].divisions == plain[second].divisions
    assert mixed[second].workspace_bytes == plain[second].workspace_bytes


def test_norms_of_low_precision_are_tried():
    """With autocast, a norm saves tensors of its weight's type, unlike PyTorch's prediction.

    Gradients that share their memory are measured, too: those of a mean are one number.
    """

    class Cast(nn.Sequential):
        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(x).float()

    model = Cast(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    inputs = (torch.randn(4, 3, 24, 24), torch.randn(4, 8, 24, 24))
    own = (model, nn.functional.mse_loss, inputs)
    traced = pmt.trace(*own)
    found = choose_divisions(traced, budget_bytes=min_budget_bytes(traced))
    assert "DividedNormBackward" in describe_divided_kernels(divide_convolutions(traced, found))
    assert find_differences(pmt.compile(*own, ram="90%", device="rpi4b"), *own) == []
    model, _, (x, _) = wide()
    traced = pmt.trace(model[:3], lambda y, _: y.mean(), (x, x))
    assert divide_convolutions(
        traced, choose_divisions(traced, budget_bytes=min_budget_bytes(traced))
    ).graph.nodes
