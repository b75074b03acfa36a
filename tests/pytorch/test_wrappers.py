"""Models inside of DDP and FSDP2: refusals with advice, and the advice when it is followed."""

import copy
import shutil
from datetime import timedelta

import pytest
import torch
from torch import distributed, nn
from torch._dynamo.exc import BackendCompilerFailed, Unsupported
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import poetmodel.torch as pmt
from kit.rotation import mark_seeds_except
from poetmodel.torch.dynamo.wrappers import fsdp_modes, has_other_compiled_modules

pytestmark = [
    pytest.mark.skipif(not distributed.is_gloo_available(), reason="PyTorch has no gloo here"),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # Dynamo reads it
]
WIDTH = 64
OPTIONS = {"fullgraph": True, "dynamic": False}


class Block(nn.Module):
    """A layer; its forward does not call itself self."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(own, x):  # noqa: N805 - FSDP2 is recognized by the value
        """Return the next activations."""
        return x + nn.functional.gelu(own.layer(x))


class Tower(nn.Module):
    """Blocks and a loss."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        """Return a loss."""
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Wide(nn.Module):
    """Layers with a bucket of DDP each."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(3))

    def forward(self, x):
        """Return a loss."""
        for layer in self.layers:
            x = x + nn.functional.gelu(layer(x))
        return x.square().mean()


@pytest.fixture
def alone():
    """Run a test as the one process of a group."""
    torch._dynamo.reset()
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def trained(model, step, xs):
    """Return losses and weights of a model that some steps train, called as it is by default."""
    step = step or model
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for x in xs:
        optimizer.zero_grad()
        loss = step(x)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    weights = [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()]
    return losses + [weight.clone() for weight in weights]


def same(a, b):
    """Return whether all tensors have the same bits."""
    return len(a) == len(b) and all(map(torch.equal, a, b))


def batches(count=2):
    """Return some batches."""
    return [torch.randn(256, WIDTH) for _ in range(count)]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("in_place", mark_seeds_except([False, True], [True]))
def test_a_whole_model_in_ddp_has_the_bits_of_eager(in_place, tmp_path):
    """Buckets of DDP count; without optimize_ddp there is one graph."""
    model, xs = Tower(), batches()
    eager = copy.deepcopy(model)
    back = pmt.backend("75%", cache=tmp_path)
    wrapped = model
    if in_place:
        model.compile(backend=back, **OPTIONS)
    else:
        wrapped = torch.compile(model, backend=back, **OPTIONS)
    step = DistributedDataParallel(wrapped)
    with torch._dynamo.config.patch(optimize_ddp=False):
        found = trained(model, step, xs)
    assert same(found, trained(eager, DistributedDataParallel(eager), xs))
    (record,) = back.plans
    assert record.predicted_peak_bytes <= record.ram_budget_bytes < record.keep_all_bytes
    alone = pmt.backend("75%", cache=tmp_path)
    twin = Tower()
    torch.compile(twin, backend=alone, **OPTIONS)(xs[0])
    buckets_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert record.keep_all_bytes == alone.plans[0].keep_all_bytes + buckets_bytes


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="Inductor: no g++ on PATH")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch
@pytest.mark.usefixtures("alone")
def test_peaks_of_inductor_include_buckets_of_ddp():
    """So that a budget that a plan meets permits its steps, and an evaluation."""
    x = batches(1)[0]
    model = Tower()
    buckets_bytes = sum(parameter.nbytes for parameter in model.parameters())

    def train(wrap, ram):
        torch._dynamo.reset()
        back = pmt.backend(ram, kernels="inductor", cache=False, gap=0.5)
        step = wrap(torch.compile(model, backend=back, **OPTIONS))
        with torch._dynamo.config.patch(optimize_ddp=False):
            for _ in range(2):
                step(x).backward()
            with torch.no_grad():
                step(x)
        (record,) = back.plans
        assert record.predicted_peak_bytes <= record.ram_budget_bytes
        return record.predicted_peak_bytes

    peaks_bytes = [train(wrap, "100%") for wrap in (lambda step: step, DistributedDataParallel)]
    assert peaks_bytes[1] == peaks_bytes[0] + buckets_bytes
    train(DistributedDataParallel, peaks_bytes[1])


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_buckets_of_ddp_share_a_budget():
    """As optimize_ddp splits a model, with eager's bits; kernels of Inductor are refused."""
    model, xs = Wide(), [torch.randn(1024, 512) for _ in range(3)]
    eager = copy.deepcopy(model)
    back = pmt.backend("80%", cache=False, gap=0.5)
    model.compile(backend=back, **OPTIONS)
    step = DistributedDataParallel(model, bucket_cap_mb=1)
    found = trained(model, step, xs)
    assert same(found, trained(eager, DistributedDataParallel(eager), xs))
    (choice,) = back._steps.choices
    assert len(choice.plans) > 1
    assert choice.peak_bytes <= choice.budget_bytes < choice.keep_all_bytes
    torch._dynamo.reset()
    back = pmt.backend("75%", cache=False, kernels="inductor")
    told = r"each of its buckets.*set torch\._dynamo\.config\.optimize_ddp = False"
    step = DistributedDataParallel(torch.compile(eager, backend=back, **OPTIONS))
    with pytest.raises(BackendCompilerFailed, match=told) as refused:
        step(xs[0])
    assert isinstance(refused.value.inner_exception, pmt.CaptureError)
    assert back.summary().startswith("nothing ran, because")
    assert not back.plans


@pytest.mark.slow
def test_modules_compiled_around_a_module_are_no_siblings_of_it():
    """Compiled by `torch.compile` or in place; another compiled block is a sibling."""
    block, other = nn.Linear(3, 3), nn.Linear(3, 3)
    model = nn.Sequential(block, other)
    compiled_model = torch.compile(model, backend="eager")
    assert not has_other_compiled_modules(block)
    compiled_model.compile(backend="eager")
    model.compile(backend="eager")
    assert not has_other_compiled_modules(block)
    other.compile(backend="eager")
    assert has_other_compiled_modules(block)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_wrappers_refuse_gradients_that_are_not_returned(alone, is_sharded):
    """They reduce autograd's gradients, also if a function was compiled before."""
    back = pmt.backend("100%", cache=False, add_gradients=True)
    model, (x, _) = Block(), batches()
    model.compile(backend=back, **OPTIONS)
    if not is_sharded:
        model(x).sum().backward()
    wrapped = fully_shard(model, mesh=alone) if is_sharded else DistributedDataParallel(model)
    with (
        torch._dynamo.config.patch(optimize_ddp=False),
        pytest.raises((pmt.CaptureError, BackendCompilerFailed), match="add_gradients: Distrib"),
    ):
        wrapped(x)


@pytest.mark.parametrize(
    ("is_called", "options"),
    [
        (False, {}),
        (True, OPTIONS),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((False, OPTIONS), (True, {}))),
    ],
)
@pytest.mark.usefixtures("alone")
def test_a_compiled_wrapper_is_refused(is_called, options):
    """However it is compiled: compile the module inside, then wrap it."""
    back = pmt.backend("75%", cache=False)
    wrapped = DistributedDataParallel(Tower())

    def call(x):
        return wrapped(x)

    step = torch.compile(call if is_called else wrapped, backend=back, **options)
    told = r"compile the module inside, then wrap it: DistributedDataParallel\(torch\.compile\("
    with (
        torch._dynamo.config.patch(optimize_ddp=False),
        pytest.raises((Unsupported, BackendCompilerFailed), match=told),
    ):
        step(batches()[0])
    assert "nothing ran, because" in back.summary()
    assert "compile the module inside, then wrap it" in back.summary()


@pytest.mark.slow
def test_sharded_blocks_share_a_budget(alone, tmp_path):
    """Compiled one by one, in any order, and like torchtitan; unsharded parameters count."""
    eager, xs = Tower(), batches(3)
    expected = trained(copy.deepcopy(eager), None, xs)
    for order in ("compiled first", "sharded first", "wrapped"):
        torch._dynamo.reset()
        model, back = copy.deepcopy(eager), pmt.backend("80%", cache=tmp_path, gap=0.5)
        for k, block in enumerate(model.blocks):
            if order == "sharded first":
                fully_shard(block, mesh=alone)
            if order == "wrapped":
                model.blocks[k] = torch.compile(block, backend=back, **OPTIONS)
            else:
                block.compile(backend=back, **OPTIONS)
            if order != "sharded first":
                fully_shard(model.blocks[k], mesh=alone)
        fully_shard(model, mesh=alone)
        assert same(trained(model, model, xs), expected), order
        (choice,) = back._steps.choices
        assert len(choice.plans) == 4
        assert choice.peak_bytes <= choice.budget_bytes < choice.keep_all_bytes


def test_modes_of_sharded_blocks_are_in_the_order_of_the_model(alone):
    """Whatever the order in which the blocks were captured, so that a step is found again."""
    model = Tower()
    for block in model.blocks:
        fully_shard(block, mesh=alone)
    fully_shard(model, mesh=alone)
    model(*batches(1))
    model.blocks[2].unshard()
    modules = [model, *model.blocks]
    modes = {fsdp_modes(modules[k:] + modules[:k]) for k in range(len(modules))}
    assert len(modes) == 1
    assert len(set(*modes)) > 1


def test_sharded_parts_of_a_compiled_module_are_refused_and_a_whole_model_is_not(alone):
    """The advice has eager's bits."""
    eager, xs = Tower(), batches()
    inside, whole = copy.deepcopy(eager), copy.deepcopy(eager)
    told = (
        r"compile the module that contains the blocks, then wrap that module alone: model\.compile"
    )
    back = pmt.backend("100%", cache=False)
    for block in inside.blocks:
        fully_shard(block, mesh=alone)
    inside.compile(backend=back, **OPTIONS)
    with pytest.raises(Unsupported, match=told):
        inside(xs[0])
    assert back.summary().startswith("nothing ran, because")
    back = pmt.backend("75%", cache=False)
    whole.compile(backend=back, **OPTIONS)
    fully_shard(whole, mesh=alone)
    assert same(trained(whole, whole, xs), trained(copy.deepcopy(eager), None, xs))
    (record,) = back.plans
    assert record.predicted_peak_bytes <= record.ram_budget_bytes < record.keep_all_bytes


def train_in_a_group(rank, folder):
    """Train in one of two processes as recommended, and compare with eager PyTorch."""
    store = distributed.FileStore(str(folder / "store"), 2)
    distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(1)
    models = [Tower() for _ in range(4)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    torch.manual_seed(rank)
    xs = batches()
    torch._dynamo.config.optimize_ddp = False
    back = pmt.backend("75%", cache=False)
    replicated = DistributedDataParallel(torch.compile(models[0], backend=back, **OPTIONS))
    sharded = models[1]
    sharded.compile(backend=back, **OPTIONS)
    fully_shard(sharded, mesh=mesh)
    fully_shard(models[3], mesh=mesh)
    assert same(
        trained(models[0], replicated, xs),
        trained(models[2], DistributedDataParallel(models[2]), xs),
    )
    assert same(trained(sharded, sharded, xs), trained(models[3], models[3], xs))
    assert all(record.predicted_peak_bytes <= record.ram_budget_bytes for record in back.plans)
    distributed.barrier()
    distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_train_as_the_advice_says(tmp_path, monkeypatch, pytestconfig):
    """By DDP and by FSDP2, with eager's bits."""
    monkeypatch.syspath_prepend(pytestconfig.rootpath)  # processes import this module by name
    torch.multiprocessing.spawn(train_in_a_group, (tmp_path,), nprocs=2)
