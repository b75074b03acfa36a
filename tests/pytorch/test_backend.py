"""A budget for ``torch.compile``: eager's bits, and a peak that was predicted."""

from __future__ import annotations

import copy
import errno
import gc
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit  # noqa: E402
from torch._inductor import config as inductor_config  # noqa: E402
from torch._inductor.utils import fresh_cache  # noqa: E402
from torch.nn import functional  # noqa: E402

import poetmodel.torch as pmt  # noqa: E402
from poetmodel.device import Device, StorageMode  # noqa: E402
from poetmodel.device.hardware import Compute, Storage, Transfer  # noqa: E402
from poetmodel.errors import BudgetError, InputError  # noqa: E402
from poetmodel.torch.capturing.replay import heap_peak_bytes  # noqa: E402
from poetmodel.torch.dynamo import costs, pages, planning  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.torch

STEPS = 3
ANY_GAP = 0.99
"""Where the schedule need not be a good one."""
LIMIT_S = 120.0
"""For proofs: far more than any of them takes on an idle machine."""


class Case(NamedTuple):
    """A model with its loss and a batch."""

    model: nn.Module
    loss: Callable[..., torch.Tensor]
    batch: tuple[torch.Tensor, ...]

    def compiled(self, ram: str | int, **options: Any) -> tuple[nn.Module, Any, pmt.Backend]:
        """Return a copy of the model, its compiled step, and the back end."""
        torch._dynamo.reset()
        model = copy.deepcopy(self.model)
        back = pmt.backend(ram, **{"cache": False, **options})

        def step(*batch: torch.Tensor) -> torch.Tensor:
            return self.loss(model, *batch)

        return model, torch.compile(step, backend=back, fullgraph=True, dynamic=False), back

    def eager(self) -> list[torch.Tensor]:
        """Return what eager PyTorch computes."""
        model = copy.deepcopy(self.model)
        return trained(model, lambda *batch: self.loss(model, *batch), self.batch)


def trained(model: nn.Module, step: Any, batch: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Return losses, gradients, buffers and states of the generator of some steps."""
    values = []
    for seed in range(STEPS):
        torch.manual_seed(seed)
        model.zero_grad()
        loss = step(*batch)
        loss.backward()
        values += [loss.detach(), torch.get_rng_state()]
        values += [parameter.grad.clone() for parameter in model.parameters()]
        values += [buffer.clone() for buffer in model.buffers()]
    return values


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    """Return whether all tensors have the same bits."""
    return len(a) == len(b) and all(map(torch.equal, a, b))


def classified(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the loss of a classifier."""
    return functional.cross_entropy(model(x), y)


def mlp() -> Case:
    """Return a chain of linear layers."""
    layers = (layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU()))
    batch = torch.randn(128, 64), torch.randint(0, 10, (128,))
    return Case(nn.Sequential(*layers, nn.Linear(64, 10)), classified, batch)


def cnn() -> Case:
    """Return convolutions, one of them grouped, with batch norm and dropout."""

    def block(ins: int, outs: int, groups: int = 1) -> tuple[nn.Module, ...]:
        convolution = nn.Conv2d(ins, outs, 3, padding=1, groups=groups)
        return convolution, nn.BatchNorm2d(outs), nn.ReLU(), nn.Dropout(0.2)

    body = nn.Sequential(*block(3, 8), *block(8, 8, 4), nn.MaxPool2d(2), *block(8, 16))
    model = nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    return Case(model, classified, (torch.randn(8, 3, 16, 16), torch.randint(0, 10, (8,))))


class UNet(nn.Module):
    """A small U-Net with transposed convolutions and one that interpolates."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.middle = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.out = nn.Conv2d(16, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits for each pixel."""
        skipped = self.down(x)
        middle = self.middle(functional.max_pool2d(skipped, 2))
        middle = functional.interpolate(functional.avg_pool2d(middle, 2), scale_factor=2) + middle
        return self.out(torch.cat([self.up(middle), skipped], 1))


def unet() -> Case:
    """Return a U-Net on small images."""
    batch = torch.randn(4, 3, 32, 32), torch.randint(0, 4, (4, 32, 32))
    return Case(UNet(), classified, batch)


class Decoder(nn.Module):
    """A decoder with scaled dot-product attention, RMS norm, and gated linear units."""

    def __init__(self, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, width)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2 * layers))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.gate = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))
        self.head = nn.Linear(width, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits of the next token."""
        x = self.embedding(tokens)
        for i, (qkv, gate, down) in enumerate(zip(self.qkv, self.gate, self.down, strict=True)):
            heads = qkv(self.norms[2 * i](x)).view(*tokens.shape, 3, 4, -1).permute(2, 0, 3, 1, 4)
            attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
            x = x + attended.transpose(1, 2).flatten(2)
            x = x + down(functional.silu(gate(self.norms[2 * i + 1](x))))
        return self.head(x)


def decoder() -> Case:
    """Return a decoder that predicts the next token."""

    def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(
            model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        )

    return Case(Decoder(), loss, (torch.randint(0, 50, (4, 32)),))


def autocast() -> Case:
    """Return a classifier with dropout in bfloat16."""
    case = cnn()

    def loss(model: nn.Module, *batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return classified(model, *batch)

    return case._replace(loss=loss)


CASES = {case.__name__: case for case in (mlp, cnn, unet, decoder, autocast)}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    """Return one of the models."""
    torch.manual_seed(0)
    return CASES[request.param]()


def vit() -> Case:
    """Return a vision transformer with dropout."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True, norm_first=True)

    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(3, 32, 4, 4)
            self.places = nn.Parameter(0.02 * torch.randn(1, 64, 32))
            self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(6))
            self.head = nn.Linear(32, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.patches(x).flatten(2).transpose(1, 2) + self.places
            for each in self.layers:
                x = each(x)
            return self.head(x.mean(1))

    return Case(Patches(), classified, (torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))))


def bert() -> Case:
    """Return BERT of transformers on texts of several lengths, with a mask."""
    library = pytest.importorskip("transformers")
    config = library.BertConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=64, problem_type="single_label_classification",
    )  # fmt: skip
    mask = torch.arange(24)[None] < torch.tensor([24, 9, 17, 5])[:, None]

    def loss(model: nn.Module, tokens: torch.Tensor, mask: torch.Tensor, y: torch.Tensor) -> Any:
        return model(input_ids=tokens, attention_mask=mask, labels=y).loss

    batch = (torch.randint(0, 99, (4, 24)), mask.long(), torch.randint(0, 2, (4,)))
    return Case(library.BertForSequenceClassification(config).train(), loss, batch)


def gpt2() -> Case:
    """Return GPT-2 small of transformers."""
    library = pytest.importorskip("transformers")
    model = library.GPT2LMHeadModel(library.GPT2Config())
    model.loss_type = "ForCausalLM"  # Dynamo refuses what it logs otherwise

    def loss(model: nn.Module, tokens: torch.Tensor) -> Any:
        return model(input_ids=tokens, labels=tokens, use_cache=False).loss

    return Case(model.train(), loss, (torch.randint(0, 50_000, (1, 128)),))


@pytest.mark.slow
@pytest.mark.parametrize("ram", ["60%", "50%", "40%"])
@pytest.mark.parametrize("make", [cnn, unet, decoder, vit, bert, gpt2, autocast])
def test_small_budgets_or_the_least(make: Callable[[], Case], ram: str) -> None:
    """What a budget does not leave room for is refused, with one that is kept."""
    torch.manual_seed(0)
    check_budget(make(), ram)


@pytest.mark.parametrize("ram", ["100%", "75%"])
def test_steps_have_the_bits_of_eager_within_a_budget(case: Case, ram: str) -> None:
    """Loss, gradients, buffers, generator; the allocator's peak is what was predicted."""
    check_budget(case, ram)


@pytest.mark.parametrize("rows", [1, 256])
def test_copies_of_parts_are_as_large_as_what_they_are_parts_of(rows: int) -> None:
    """PyTorch copies the whole storage of what it writes into, such as that of a small norm."""

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.InstanceNorm2d(4, track_running_stats=True)
            self.weight = nn.Parameter(torch.randn(4, 16, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = (self.norm(x) @ self.weight).repeat(1, 1, rows, 64)
            x[:1, :1] = 2 * x[:1, :1]
            return x[:, 0, :16].cos().sum()

    torch.manual_seed(0)
    check_budget(Case(Parts(), lambda model, x: model(x), (torch.randn(2, 4, 16, 16),)), "100%")


def check_budget(case: Case, ram: str) -> None:
    """Train within a budget, or the least where the kernels of a processor leave no room for it."""
    try:
        case.compiled(ram, gap=ANY_GAP)[1](*case.batch)
    except BackendCompilerFailed:
        ram = str(enough_of(case))
    model, step, back = case.compiled(ram, gap=0.1, time_limit=LIMIT_S)
    assert same(trained(model, step, case.batch), case.eager())
    (record,) = back.plans

    def once() -> None:
        model.zero_grad()
        step(*case.batch).backward()

    model.zero_grad()
    peak = heap_peak_bytes(once)
    assert peak <= record.predicted_peak_bytes <= 1.03 * peak
    assert record.predicted_peak_bytes <= record.ram_budget_bytes <= record.keep_all_bytes
    assert record.recomputed > 0 or ram == "100%"
    planned = back._planned[0]
    one_pass_s = planned.result.problem.objective.baseline
    assert 1 + record.overhead == pytest.approx(planned.check.makespan_s / one_pass_s)
    assert record.status == "optimal" or record.solve_s >= LIMIT_S


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what Inductor says of PyTorch
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor: no g++ on PATH")
@pytest.mark.parametrize("name", ["mlp", "cnn", "unet", "decoder"])
def test_kernels_of_inductor_compute_what_it_does_within_a_budget(name: str) -> None:
    """Bit by bit, whatever is computed again in other kernels."""
    torch.manual_seed(0)
    case = CASES[name]()
    torch._dynamo.reset()
    model = copy.deepcopy(case.model)
    stock = torch.compile(lambda *batch: case.loss(model, *batch), fullgraph=True, dynamic=False)
    expected = trained(model, stock, case.batch)
    model, step, back = case.compiled("80%", kernels="inductor", gap=0.1)
    assert same(trained(model, step, case.batch), expected)
    (record,) = back.plans
    model.zero_grad()
    peak = heap_peak_bytes(lambda: step(*case.batch).backward())
    assert peak <= record.predicted_peak_bytes <= 1.05 * peak
    assert record.predicted_peak_bytes <= record.ram_budget_bytes < record.keep_all_bytes


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what Inductor says of PyTorch
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor: no g++ on PATH")
def test_what_inductor_takes_beside_a_plan_is_known_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the first plan is the one that was compiled last."""
    from poetmodel.torch.dynamo import inductor

    torch.manual_seed(0)
    case = mlp()
    compile_fx, measured = inductor.compile_fx, inductor.heap_peak_bytes
    compiles: list[Any] = []

    def counted(*given: Any, **options: Any) -> Any:
        compiles.append(given)
        return compile_fx(*given, **options)

    monkeypatch.setattr(inductor, "compile_fx", counted)
    monkeypatch.setattr(inductor, "heap_peak_bytes", lambda work: measured(work) + 2**16)
    records, counts = [], []
    for _ in range(2):
        _, step, back = case.compiled("80%", kernels="inductor", gap=0.1, cache=tmp_path)
        step(*case.batch).backward()
        records.append(replace(back.plans[0], solve_s=0.0))
        counts.append(len(compiles))
        compiles.clear()
    assert counts[0] > counts[1] == 1
    assert records[0] == records[1]


PYOMO_FIRST = """
import pyomo.environ
import torch
import poetmodel.torch as pmt

back = pmt.backend("1MiB", kernels="inductor", cache=False)
layer = torch.nn.Linear(4, 4)
for backend in (back, "inductor"):
    torch._dynamo.reset()
    torch.compile(lambda x: layer(x).sum(), backend=backend, fullgraph=True)(
        torch.ones(2, 4)
    ).backward()
print(len(back.plans))
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor: no g++ on PATH")
def test_inductor_compiles_where_pyomo_was_loaded_first(tmp_path: Path) -> None:
    """Pyomo's mock modules of optional packages do not end Inductor's pickling."""
    done = subprocess.run(
        [sys.executable, "-c", PYOMO_FIRST],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "1"), done.stderr


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what Inductor says of PyTorch
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor: no g++ on PATH")
def test_a_partitioner_is_set_up_by_hand() -> None:
    """In Inductor's own settings."""
    torch.manual_seed(0)
    case = mlp()
    torch._dynamo.reset()
    split = pmt.partitioner("60%", cache=False)
    with fresh_cache(), inductor_config.patch(custom_partitioner_fn=split):
        step = torch.compile(
            lambda *batch: case.loss(case.model, *batch), fullgraph=True, dynamic=False
        )
        step(*case.batch).backward()
    (record,) = split.graphs.plans
    assert record.recomputed > 0


def test_pages_come_back_as_they_went(tmp_path: Path) -> None:
    """Where nothing may be computed again; slots are given back, and the file goes with it all."""
    torch.manual_seed(0)
    case = cnn()
    least = enough_of(case, storage=tmp_path / "refused")
    model, step, back = case.compiled(least, storage=tmp_path / "pages", gap=ANY_GAP)
    assert same(trained(model, step, case.batch), case.eager())
    (record,) = back.plans
    assert record.paged_out > 0
    assert record.predicted_peak_bytes <= least
    (file,) = (tmp_path / "pages").iterdir()
    size = file.stat().st_size
    step(*case.batch)  # a graph that nobody goes back through
    gc.collect()
    trained(model, step, case.batch)
    assert file.stat().st_size == size
    del model, step, back
    torch._dynamo.reset()
    gc.collect()
    assert not any((tmp_path / "pages").iterdir())


def enough_of(case: Case, **options: Any) -> int:
    """Return the budget that a refusal names [B]."""
    _, step, _ = case.compiled(1, **options)
    with pytest.raises(Exception, match="is too little for graph 0") as refused:
        step(*case.batch)
    found = re.search(r"ram=(\d+)", str(refused.value))
    assert found is not None
    return int(found[1])


def test_a_budget_that_cannot_be_kept_is_refused_with_one_that_can() -> None:
    """That is kept."""
    torch.manual_seed(0)
    case = cnn()
    enough = enough_of(case)
    _, step, back = case.compiled(enough)
    step(*case.batch).backward()
    assert back.plans[0].predicted_peak_bytes == enough
    _, step, _ = case.compiled(int(0.9 * enough))
    with pytest.raises(Exception, match="is too little"):
        step(*case.batch)


def test_gradients_add_up_and_are_clipped() -> None:
    """As a training loop with accumulation does it."""
    torch.manual_seed(0)
    case = mlp()

    def loop(model: nn.Module, step: Any) -> list[torch.Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(2):
            for _ in range(2):
                (step(*case.batch) / 2).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach() for parameter in model.parameters()]

    model, step, _ = case.compiled("60%")
    eager = copy.deepcopy(case.model)
    assert same(loop(model, step), loop(eager, lambda *batch: case.loss(eager, *batch)))


def test_two_steps_may_be_under_way(tmp_path: Path) -> None:
    """Each has its own pages and masks."""
    torch.manual_seed(0)
    case = cnn()

    def both(model: nn.Module, step: Any) -> list[torch.Tensor]:
        torch.manual_seed(1)
        first, second = step(*case.batch), step(*case.batch)
        second.backward()
        first.backward()
        return [parameter.grad for parameter in model.parameters()]

    least = enough_of(case, storage=tmp_path)
    model, step, _ = case.compiled(least, storage=tmp_path, gap=ANY_GAP)
    eager = copy.deepcopy(case.model)
    assert same(both(model, step), both(eager, lambda *batch: case.loss(eager, *batch)))


def test_another_shape_is_planned_anew() -> None:
    """Evaluation without gradients, too."""
    torch.manual_seed(0)
    case = mlp()
    model, step, back = case.compiled("80%")
    step(*case.batch).backward()
    half = tuple(value[:64] for value in case.batch)
    step(*half).backward()
    with torch.no_grad():
        loss = step(*case.batch)
        assert torch.equal(loss, case.loss(model, *case.batch))
    names = [record.name for record in back.plans]
    assert len(set(names)) == len(names) == 3
    whole, smaller, evaluation = (record.keep_all_bytes for record in back.plans)
    assert evaluation < smaller < whole


def test_a_known_graph_is_not_solved_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a later process, or where one back end captures it again under another name."""
    torch.manual_seed(0)
    case = mlp()
    _, step, first = case.compiled("60%", cache=tmp_path)
    step(*case.batch)
    solves = []
    monkeypatch.setattr(planning, "solve", lambda *given, **_: solves.append(given))
    monkeypatch.setattr(costs.Forms, "_run", None)
    model, step, back = case.compiled("60%", cache=tmp_path)
    assert same(trained(model, step, case.batch), case.eager())
    torch._dynamo.reset()
    assert same(trained(model, step, case.batch), case.eager())
    assert not solves
    assert [record.name for record in back.plans] == ["graph 0", "graph 1"]
    records = [replace(record, solve_s=0.0, name="") for record in (*first.plans, *back.plans)]
    assert records[1:] == records[:1] * 2


def test_a_schedule_for_a_wider_gap_is_improved(tmp_path: Path) -> None:
    """What was proved then is no proof for this gap."""
    torch.manual_seed(0)
    case = cnn()
    options = {"cache": tmp_path, "device": "jetson-tx2"}
    _, step, first = case.compiled("60%", gap=ANY_GAP, **options)
    step(*case.batch)
    _, step, second = case.compiled("60%", gap=0.0, **options)
    step(*case.batch)
    assert first.plans[0].gap > 0 == second.plans[0].gap
    assert second.plans[0].overhead <= first.plans[0].overhead


def test_graph_breaks_are_refused() -> None:
    """Their saved tensors add up."""
    torch._dynamo.reset()
    back = pmt.backend("60%", cache=False)
    with pytest.raises(Exception, match="pass fullgraph=True"):
        torch.compile(nn.Linear(4, 4), backend=back)(torch.randn(2, 4))


def test_unknown_sizes_are_refused() -> None:
    """With what to pass."""
    torch._dynamo.reset()
    back = pmt.backend("60%", cache=False)
    compiled = torch.compile(nn.Linear(4, 4), backend=back, fullgraph=True, dynamic=True)
    with pytest.raises(Exception, match="pass dynamic=False"):
        compiled(torch.randn(3, 4))


def test_a_cut_file_is_noticed(tmp_path: Path) -> None:
    """By the step that reads it."""
    torch.manual_seed(0)
    case = cnn()
    least = enough_of(case, storage=tmp_path / "refused")
    _, step, _ = case.compiled(least, storage=tmp_path / "pages", gap=ANY_GAP)
    step(*case.batch).backward()
    loss = step(*case.batch)
    (file,) = (tmp_path / "pages").iterdir()
    with file.open("r+b") as stream:
        stream.truncate(1)
    with pytest.raises(pmt.PageError, match=r"the file was cut|is not what was written"):
        loss.backward()


def test_a_full_disk_ends_the_step_with_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one with room has eager's bits."""
    torch.manual_seed(0)
    case = cnn()
    least = enough_of(case, storage=tmp_path / "refused")
    model, step, _ = case.compiled(least, storage=tmp_path / "pages", gap=ANY_GAP)

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    buffers = copy.deepcopy(list(model.buffers()))
    with monkeypatch.context() as patch:
        patch.setattr(pages.os, "posix_fallocate", full)
        with pytest.raises(pmt.PageError, match=r"could not be written: No space left"):
            step(*case.batch)
    assert same(buffers, list(model.buffers()))
    assert same(trained(model, step, case.batch), case.eager())


def test_errors_of_dynamo_hold_one_sentence() -> None:
    """A message of ours is the error within that of ``torch.compile``."""
    torch.manual_seed(0)
    case = cnn()
    _, step, _ = case.compiled("1KiB")
    with pytest.raises(BackendCompilerFailed) as refused:
        step(*case.batch)
    inner = refused.value.inner_exception
    assert isinstance(inner, BudgetError)
    assert re.fullmatch(
        r"ram: 1\.00 KiB is too little for graph 0: (the least is )?ram=\d+\b.*", str(inner)
    )


def test_a_step_fails_where_it_would_run_without_its_budget() -> None:
    """After PyTorch's limit of recompilations."""
    torch.manual_seed(0)
    case = mlp()
    _, step, back = case.compiled("100%")
    x, y = case.batch
    with torch._dynamo.config.patch(recompile_limit=2):
        step(x, y)
        step(x[:9], y[:9])
        with pytest.raises(FailOnRecompileLimitHit):
            step(x[:7], y[:7])
    assert len(back.plans) == 2


def test_reports_hold_every_graph(tmp_path: Path) -> None:
    """As JSON, as a page, and as lines."""
    torch.manual_seed(0)
    case = mlp()
    _, step, back = case.compiled("60%")
    with pytest.raises(InputError, match="nothing to report"):
        back.report(tmp_path / "plans.json")
    step(*case.batch).backward()
    back.report(tmp_path / "plans.json")
    values = json.loads((tmp_path / "plans.json").read_text())
    assert values["plans"] == [record.to_dict() for record in back.plans]
    back.report(tmp_path / "plan.html")
    assert "<html" in (tmp_path / "plan.html").read_text()[:200]
    with pytest.raises(InputError):
        back.report(tmp_path / "plans.txt")
    assert back.summary().count("\n") == 0
    assert "recomputed" in back.summary()


@pytest.mark.parametrize(
    "options",
    [
        {"kernels": "mine"},
        {"costs": "guessed"},
        {"costs": "measured", "device": "rpi4b"},
        {"costs": "measured", "kernels": "inductor"},
        {"storage": "pages", "kernels": "inductor"},
        {"device": 5},
        {"storage": ""},
        {"storage": 5},
        {"cache": None},
        {"on_progress": 5},
        {"storage": "pa\0ges"},
    ],
)
def test_what_is_no_option_is_refused(options: dict[str, Any]) -> None:
    """Before anything is compiled."""
    with pytest.raises(InputError):
        pmt.backend("60%", **options)


@pytest.mark.parametrize("options", [{"costs": "measured"}, {"device": "rpi4b"}])
def test_costs_come_from_where_they_are_asked(options: dict[str, Any]) -> None:
    """Measured, or of a device, which the record names."""
    torch.manual_seed(0)
    case = mlp()
    model, step, back = case.compiled("60%", **options)
    assert same(trained(model, step, case.batch), case.eager())
    assert back.plans[0].device == options.get("device", back.plans[0].device)


# -- gradients that autograd copies, checks, operators of users, pages that lie otherwise --------


class Summed(nn.Module):
    """A large weight whose gradient is one number, in each element."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(128, 128)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a number."""
        return (x * x).mean() + self.first.sum()


class Added(Summed):
    """Two weights of one gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a number."""
        return (x @ (self.first + self.second)).pow(2).mean()


@pytest.mark.parametrize("kind", [Summed, Added])
@pytest.mark.parametrize("kernels", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what Inductor says of PyTorch
def test_copies_of_gradients_count(kind: type[Summed], kernels: str) -> None:
    """Autograd copies what lies otherwise than its parameter, or is handed over twice."""
    torch.manual_seed(0)
    case = Case(kind(), lambda model, x: model(x), (torch.randn(16, 128),))
    model, step, back = case.compiled("100%", kernels=kernels)
    step(*case.batch).backward()
    model.zero_grad()
    peak = heap_peak_bytes(lambda: step(*case.batch).backward())
    predicted = back.plans[0].predicted_peak_bytes
    assert peak <= predicted <= (1.03 if kernels == "eager" else 1.6) * peak


@pytest.mark.parametrize("paging", [False, True])
def test_results_that_the_caller_has_count(paging: bool, tmp_path: Path) -> None:
    """Logits beside a loss stay for the whole backward pass: to let them go frees nothing."""
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(32, 100))
    x, y = torch.randn(128, 32), torch.randint(0, 100, (128,))

    def both(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = model(x)
        return functional.cross_entropy(logits, y), logits

    storage = tmp_path if paging else None
    for ram in ("100%", "90%"):
        torch._dynamo.reset()
        back = pmt.backend(ram, cache=False, storage=storage, gap=ANY_GAP)
        step = torch.compile(both, backend=back, fullgraph=True, dynamic=False)

        def once(step: Any = step) -> None:
            loss, _logits = step(x, y)
            loss.backward()

        once()
        model.zero_grad()
        peak = heap_peak_bytes(once)
        model.zero_grad()
        (record,) = back.plans
        assert peak <= record.predicted_peak_bytes <= min(1.03 * peak, record.ram_budget_bytes)


class Normed(nn.Module):
    """A norm over channels that come last, behind a layer that is not trained."""

    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16, dtype=kind), nn.Linear(16, 16, dtype=kind)
        self.norms = nn.ModuleList(nn.BatchNorm1d(16, dtype=kind) for _ in range(2))
        self.first.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a number."""
        x = self.norms[0](self.first(x).transpose(1, 2)).transpose(1, 2)
        x = self.norms[1](functional.softplus(self.last(x)).transpose(1, 2))
        return functional.mse_loss(x, torch.ones_like(x))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
def test_norms_lie_and_leave_out_what_their_kernels_do(kind: torch.dtype) -> None:
    """PyTorch predicts other strides, and a gradient that nobody wants."""
    torch.manual_seed(0)
    batch = (torch.randn(8, 8, 16, dtype=kind),)
    model, step, _ = (case := Case(Normed(kind), lambda model, x: model(x), batch)).compiled("90%")
    model.first.weight.grad = case.model.first.weight.grad = None
    losses, expected = [], []
    eager = copy.deepcopy(case.model)
    for run, values in ((step, losses), (eager, expected)):
        loss = run(*batch)
        loss.backward()
        values.append(loss.detach())
    for own, other in zip(model.parameters(), eager.parameters(), strict=True):
        values = [t.grad if t.grad is not None else torch.zeros(1) for t in (own, other)]
        assert torch.equal(*values)
    assert same(losses, expected)
    assert same(list(model.buffers()), list(eager.buffers()))


def test_operators_of_users_are_not_computed_again() -> None:
    """They may draw random numbers, whatever they say of themselves."""

    @torch.library.custom_op("poetmodel_tests::noisy", mutates_args=())
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn_like(x)

    noisy.register_fake(torch.empty_like)
    noisy.register_autograd(lambda _, gradient: gradient)

    class Noisy(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self:
                x = torch.tanh(layer(noisy(x)))
            return x.pow(2).mean()

    torch.manual_seed(0)
    layers = (nn.Linear(32, 32) for _ in range(6))
    case = Case(Noisy(*layers), lambda model, x: model(x), (torch.randn(128, 32),))
    model, step, back = case.compiled("70%")
    assert same(trained(model, step, case.batch), case.eager())
    assert back.plans[0].recomputed > 0


@pytest.mark.parametrize("kernels", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what Inductor says of PyTorch
def test_integers_may_be_divisors(kernels: str) -> None:
    """What is measured on zeros fails there."""
    torch.manual_seed(0)

    def loss(model: nn.Module, number: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
        return model(number % divisor).pow(2).sum() + model(number // divisor).sum()

    batch = torch.randint(0, 16, (32,)), torch.randint(2, 5, (32,))
    case = Case(nn.Embedding(16, 8), loss, batch)
    model, step, _ = case.compiled("100%", kernels=kernels)
    for own, expected in zip(trained(model, step, batch), case.eager(), strict=True):
        assert torch.allclose(own, expected, atol=0 if kernels == "eager" else 1e-5)


def test_assertions_are_checked_in_each_step() -> None:
    """Although nothing reads what they make."""

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        torch._assert_async((y.abs() < 100).all(), "too large")
        return y.pow(2).mean()

    case = Case(nn.Linear(4, 4), loss, (torch.randn(8, 4),))
    model, step, _ = case.compiled("100%")
    assert same(trained(model, step, case.batch), case.eager())
    with pytest.raises(RuntimeError, match="too large"):
        step(1e6 * case.batch[0])


def test_functions_inside_of_a_graph_are_refused() -> None:
    """Nobody plans what they make."""

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (model(x),)).pow(2).mean()

    _, step, _ = Case(nn.Linear(4, 4), loss, (torch.randn(8, 4),)).compiled("100%")
    with pytest.raises(BackendCompilerFailed, match="cond takes a function") as refused:
        step(torch.randn(8, 4))
    assert isinstance(refused.value.inner_exception, pmt.CaptureError)


@pytest.mark.parametrize("loss", ["mse_loss", "smooth_l1_loss", "huber_loss"])
def test_gradients_of_losses_lie_as_their_kernels_make_them(loss: str, tmp_path: Path) -> None:
    """PyTorch predicts other strides where the prediction is transposed, and views of these."""
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(16, 16), nn.GELU())))

    def transposed(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return getattr(functional, loss)((x + model(x)).transpose(1, 2), y)

    case = Case(model, transposed, (torch.randn(8, 8, 16), torch.randn(8, 16, 8)))
    model, step, back = case.compiled("65%", storage=tmp_path, device="mkr1000", gap=ANY_GAP)
    assert same(trained(model, step, case.batch), case.eager())
    assert back.plans[0].paged_out > 0


def test_a_page_comes_back_as_it_lay(tmp_path: Path) -> None:
    """Strides, and where the tensor begins."""
    file = pages.SlotFile(tmp_path)
    tensor = torch.randn(3, 5, 7).permute(2, 0, 1)[1:]
    token = pages.page_out(tensor, file.number)
    back = pages.page_in(token, tensor.dtype, file.number)
    assert (back.stride(), back.storage_offset()) == (tensor.stride(), tensor.storage_offset())
    assert torch.equal(back, tensor)


def test_a_forked_process_has_pages_of_its_own(tmp_path: Path) -> None:
    """Both write at the same time; what was written before is only the parent's."""
    file = pages.SlotFile(tmp_path)
    tensor = torch.randn(100)
    token = pages.page_out(tensor, file.number)
    child = os.fork()
    if child == 0:
        try:
            with pytest.raises(pmt.PageError, match="began before this process was forked"):
                pages.page_in(token, tensor.dtype, file.number)
            own = pages.page_out(2 * tensor, file.number)
            del token
            other = pages.page_out(3 * tensor, file.number)
            values = [pages.page_in(t, tensor.dtype, file.number) for t in (own, other)]
            os._exit(0 if same(values, [2 * tensor, 3 * tensor]) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(pages.page_in(token, tensor.dtype, file.number), tensor)


@pytest.mark.parametrize("door", ["backend", "compile"])
def test_a_profiler_of_the_user_is_left_alone(door: str) -> None:
    """PyTorch has one at a time: what it has seen would be lost."""
    torch.manual_seed(0)
    case = mlp()
    _, step, _ = case.compiled("100%")
    if door == "compile":
        loss_fn = functional.cross_entropy
        step = partial(pmt.compile, case.model, loss_fn, ram="100%", cache=False)
    batch = (case.batch,) if door == "compile" else case.batch
    with torch.profiler.profile() as profiled, pytest.raises(Exception, match="is on, and memory"):
        step(*batch)
    assert len(profiled.key_averages()) > 0


# -- plans for a device that is not here -----------------------------------------------------------


class Blocks(nn.Module):
    """Layers that are wider than they are deep, and a batch norm whose buffers are written."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return self.norm(x).square().mean()


def test_plan_for_another_device_runs_nothing() -> None:
    """Parameters, buffers and gradients are as before."""
    model = Blocks(64, 6)
    before = [tensor.clone() for tensor in (*model.parameters(), *model.buffers())]
    back = pmt.backend(ram="70%", device="a100", cache=False)

    (record,) = back.plan_for(model, torch.zeros(512, 64))

    assert back.plans == [record]
    assert record.is_predicted
    assert record.device == "a100"
    assert record.predicted_peak_bytes <= record.ram_budget_bytes
    assert record.recomputed > 0
    assert "workspaces of kernels not counted" in back.summary()
    after = (*model.parameters(), *model.buffers())
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_plan_for_another_device_is_that_of_the_captured_graph() -> None:
    """Nothing but small workspaces tells the plan from that of a graph that is run."""
    model = Blocks(64, 6)
    batch = torch.ones(512, 64)
    imagined = pmt.backend(ram=900_000, device="a100", cache=False)
    run = pmt.backend(ram=900_000, device="a100", cache=False)

    (planned,) = imagined.plan_for(model, batch)
    torch._dynamo.reset()
    torch.compile(model, backend=run, fullgraph=True, dynamic=False)(batch).backward()

    (ran,) = run.plans
    assert not ran.is_predicted
    assert planned.keep_all_bytes == pytest.approx(ran.keep_all_bytes, rel=0.001)
    assert 0 < planned.overhead <= 1.01 * ran.overhead  # what it does not count, it does not pay


def test_model_without_memory_is_planned() -> None:
    """A model that no machine here could hold."""
    with torch.device("meta"):
        model = Blocks(16384, 12)  # 12 GiB of parameters
    back = pmt.backend(ram="60%", device="h100", cache=False)

    (record,) = back.plan_for(model, torch.empty(65536, 16384, device="meta"))

    assert record.given_bytes > 12 * 2**30
    assert 40 * 2**30 < record.predicted_peak_bytes <= record.ram_budget_bytes


def test_plan_for_another_device_pages_to_its_storage() -> None:
    """Where computing is slow and the storage is quick, pages pay."""
    rates = Transfer(latency_s=0.0, bytes_per_s=1e12, power_w=1.0)
    storage = Storage(mode=StorageMode.DMA, page_in=rates, page_out=rates)
    slow = Compute(flops_per_s=1e9, bytes_per_s=1e9, power_w=1.0)
    device = Device(name="slow", ram_bytes=2**30, compute=slow, storage=storage)
    batch = torch.empty(512, 64)

    (paged,) = pmt.backend(ram="60%", device=device, cache=False).plan_for(
        Blocks(64, 6), batch, paging=True
    )
    (kept,) = pmt.backend(ram="60%", device=device, cache=False).plan_for(Blocks(64, 6), batch)

    assert paged.paged_out > 0
    assert kept.paged_out == 0
    assert paged.overhead < kept.overhead


def test_budget_below_the_least_says_the_least_without_a_device() -> None:
    """The error is the budget's own, as one sentence."""
    back = pmt.backend(ram="1%", device="a100", cache=False)
    with pytest.raises(BudgetError, match=r"the least is ram=|is enough"):
        back.plan_for(Blocks(64, 6), torch.empty(512, 64))


@pytest.mark.parametrize(
    ("options", "paging", "expected"),
    [
        ({"costs": "measured"}, False, "nothing is run here"),
        ({"kernels": "inductor"}, False, "without running them"),
        ({}, True, "a device that has a storage"),
    ],
)
def test_plans_for_another_device_that_make_no_sense_are_refused(
    options: dict[str, Any], paging: bool, expected: str
) -> None:
    """One sentence says what is wrong, and nothing is planned."""
    back = pmt.backend(ram="60%", cache=False, **options)
    with pytest.raises(InputError, match=expected):
        back.plan_for(Blocks(64, 6), torch.empty(512, 64), paging=paging)
    assert back.plans == []
