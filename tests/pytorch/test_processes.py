"""Two processes with gloo: one plan for both, budgets that hold, bits of the same wrapper."""

import copy
import gc
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import poetmodel.torch as pmt
from poetmodel.torch.dynamo.wrappers import bucket_bytes
from poetmodel.torch.graph import profiles
from poetmodel.torch.graph.tensors import heap_peak_bytes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not distributed.is_gloo_available(), reason="PyTorch has no gloo here"),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # Dynamo reads it
]
WIDTH, ROWS = 256, 2048
OPTIONS = {"fullgraph": True, "dynamic": False}
LOSS_BYTES = 3 * ROWS * WIDTH * 4
"""What the loss of a tower takes in eager PyTorch."""


class Block(nn.Module):
    """Two layers with a residual connection."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        """Return the next activations."""
        return x + self.down(nn.functional.gelu(self.up(x)))


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


def join(rank, folder):
    """Join a group of two processes, through a file."""
    torch.set_num_threads(1)
    store = distributed.FileStore(str(folder / "store"), 2)
    distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(minutes=5)
    )


def leave():
    """End the process, after the other one has reached this point.

    DDP's C++ would otherwise join the threads of gloo while it holds the interpreter lock, for
    which these may wait.
    """
    distributed.barrier()
    os._exit(0)


def trained(model, step, rank):
    """Return losses and weights after some steps, and the highest peak of a step."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    torch.manual_seed(rank)
    losses, peaks = [], []

    def run():
        loss = step(torch.randn(ROWS, WIDTH))
        loss.backward()
        losses.append(loss.detach())

    for number in range(4):
        optimizer.zero_grad()
        if number == 0:  # compiles, which a profiler would see
            run()
        else:
            peaks.append(heap_peak_bytes(run))
        optimizer.step()
    weights = [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()]
    return losses + [weight.clone() for weight in weights], max(peaks)


def check(back, found, expected, held_bytes=0):
    """Compare with eager PyTorch, the peak with the budget, and the plans of both processes."""
    (own, peak), (wanted, _) = found, expected
    assert len(own) == len(wanted)
    assert all(map(torch.equal, own, wanted))
    (choice,) = back._steps.choices
    assert peak - ROWS * WIDTH * 4 + held_bytes <= 1.01 * choice.budget_bytes
    told = [str(choice), [planned.plan.program for planned in choice.plans]]
    others = [None, None]
    distributed.all_gather_object(others, told)
    assert others[0] == others[1]
    assert len(choice.plans) > 1
    assert choice.budget_bytes < choice.keep_all_bytes


def train_replicas(rank, folder):
    """Train by DDP, whose buckets are split by optimize_ddp.

    The second process measures larger workspaces, and has more outside of the compiled function.
    """
    join(rank, folder)
    if rank:
        profiles.heap_peak_bytes = lambda work: heap_peak_bytes(work) + 4096
    torch.manual_seed(1)
    eager, outside = Tower(), 65536 * rank
    model, back = copy.deepcopy(eager), pmt.backend("60%", cache=False, gap=0.5, outside=outside)
    model.compile(backend=back, **OPTIONS)
    step = DistributedDataParallel(model, bucket_cap_mb=1)
    expected = trained(eager, DistributedDataParallel(eager, bucket_cap_mb=1), rank)
    found = trained(model, step, rank)
    buckets_bytes = bucket_bytes(step)
    check(back, found, expected)
    assert buckets_bytes < back._steps.choices[0].budget_bytes
    leave()


def train_shards(rank, folder):
    """Train by FSDP2, each block of which is compiled and sharded, also in bf16."""
    join(rank, folder)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(1)
    original = Tower()
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for policy in (MixedPrecisionPolicy(), half):
        torch._dynamo.reset()
        eager, model = copy.deepcopy(original), copy.deepcopy(original)
        back = pmt.backend("60%", cache=False, gap=0.5, outside=LOSS_BYTES)
        for block in model.blocks:
            block.compile(backend=back, **OPTIONS)
        for sharded in (eager, model):
            for block in sharded.blocks:
                fully_shard(block, mesh=mesh, mp_policy=policy)
            fully_shard(sharded, mesh=mesh, mp_policy=policy)
        check(back, trained(model, model, rank), trained(eager, eager, rank))
    leave()


def accumulated(model, rank):
    """Return losses and weights after steps of three batches, and the peaks of all batches."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    torch.manual_seed(rank)
    losses, peaks = [], []

    def run():
        loss = model(torch.randn(ROWS, WIDTH))
        loss.backward()
        losses.append(loss.detach())

    for number in range(3):
        optimizer.zero_grad()
        for last in (False, False, True):
            model.set_requires_gradient_sync(last)
            if number == 0:  # compiles, which a profiler would see
                run()
            else:
                peaks.append(heap_peak_bytes(run))
        optimizer.step()
    weights = [parameter.full_tensor().detach().clone() for parameter in model.parameters()]
    return losses + weights, peaks


def train_accumulated_shards(rank, folder):
    """Accumulate gradients by FSDP2; those of earlier batches do not count."""
    join(rank, folder)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(1)
    eager = Tower()
    model = copy.deepcopy(eager)
    back = pmt.backend("80%", cache=False, gap=0.5, outside=LOSS_BYTES)
    for block in model.blocks:
        block.compile(backend=back, **OPTIONS)
    for sharded in (eager, model):
        for block in sharded.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
    (wanted, eager_peaks), (own, peaks) = (accumulated(each, rank) for each in (eager, model))
    assert all(map(torch.equal, own, wanted))
    choices = back._steps.choices
    budget_bytes = choices[0].budget_bytes
    assert len(choices) == 2
    assert {choice.budget_bytes for choice in choices} == {budget_bytes}
    assert budget_bytes < max(eager_peaks)
    assert max(peaks) - ROWS * WIDTH * 4 <= 1.01 * budget_bytes
    leave()


def train_beside_an_unfinished_call(rank, folder):
    """Free the tensors of calls without a backward pass later in the second process."""
    join(rank, folder)
    mesh = init_device_mesh("cpu", (2,))
    model, back = Tower(), pmt.backend("256MiB", cache=False, gap=0.5)
    del model.blocks[2:]
    for block in model.blocks:
        block.compile(backend=back, **OPTIONS)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    gc.disable()
    cycle = [model(torch.randn(ROWS, WIDTH))]
    cycle.append(cycle)
    del cycle
    for number in range(5):
        if rank == 0 or number == 2:
            gc.collect()
        model(torch.randn(ROWS, WIDTH)).backward()
    (choice,) = back._steps.choices
    assert len(choice.plans) == 2
    leave()


def train_other_shapes(rank, folder):
    """Have a batch of another size in the second process, and learn of it in both."""
    join(rank, folder)
    model, back = Tower(), pmt.backend("60%", cache=False)
    model.compile(backend=back, **OPTIONS)
    step = DistributedDataParallel(model)
    with torch._dynamo.config.patch(optimize_ddp=False):
        try:
            step(torch.randn(ROWS + rank, WIDTH))
        except torch._dynamo.exc.BackendCompilerFailed as error:
            refused = error.inner_exception
    assert isinstance(refused, pmt.CaptureError)
    assert f"process {rank} plans another graph than process {1 - rank}" in str(refused)
    assert back.summary().startswith("nothing ran, because")
    leave()


@pytest.mark.parametrize(
    "work",
    [
        train_replicas,
        train_shards,
        train_accumulated_shards,
        train_beside_an_unfinished_call,
        train_other_shapes,
    ],
)
def test_two_processes_train_within_one_budget(work, tmp_path, monkeypatch, pytestconfig):
    """By DDP and FSDP2, with one plan and the wrapper's own bits; other shapes are refused."""
    monkeypatch.syspath_prepend(pytestconfig.rootpath)  # processes import this module by its name
    torch.multiprocessing.spawn(work, (tmp_path,), nprocs=2)


def test_loops_of_other_libraries_train_a_compiled_model(pytestconfig):
    """Of transformers and Accelerate, under torchrun on a port that the system chooses."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    worker = Path(pytestconfig.rootpath) / "tests" / "kit" / "trained_processes.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    found = subprocess.run(
        [*command, "--nproc-per-node", "2", str(worker)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    assert found.stdout.count("trained") == 2
