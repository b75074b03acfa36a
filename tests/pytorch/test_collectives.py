"""Functional collectives inside of a graph: in their order, once each, in the plan's budget."""

from datetime import timedelta

import pytest
import torch
from torch import distributed, nn
from torch.distributed import _functional_collectives as collectives

import poetmodel.torch as pmt
from poetmodel.torch.graph.operators import is_collective, is_wait
from poetmodel.torch.graph.tensors import heap_peak_bytes

pytestmark = [
    pytest.mark.skipif(not distributed.is_gloo_available(), reason="PyTorch has no gloo here"),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # Dynamo reads it
    pytest.mark.filterwarnings("ignore:.*should not be instantiated"),  # Dynamo does that
]
WIDTH, DEPTH = 64, 3


class Averaged(torch.autograd.Function):
    """A parameter whose gradient is averaged over all processes."""

    @staticmethod
    def forward(_, parameter):
        """Return the parameter."""
        return parameter.view_as(parameter)

    @staticmethod
    def backward(_, gradient):
        """Return the mean gradient."""
        size = distributed.get_world_size()
        reduced = collectives.all_reduce(gradient / size, "sum", distributed.group.WORLD)
        return collectives.wait_tensor(reduced)


def train(back, rank=0):
    """Return gradients of two steps, the measured peak, and the model's step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(x for _ in range(DEPTH) for x in (nn.Linear(WIDTH, WIDTH), nn.GELU())))
    torch.manual_seed(rank)
    xs = [torch.randn(256, WIDTH) for _ in range(3)]

    def step(x):
        own = {name: Averaged.apply(value) for name, value in model.named_parameters()}
        return torch.func.functional_call(model, own, (x,)).square().mean()

    if back is not None:
        step = torch.compile(step, backend=back, fullgraph=True, dynamic=False)
    gradients = []
    step(xs[0]).backward()  # compiles
    for x in xs:
        model.zero_grad()
        peak_bytes = heap_peak_bytes(lambda x=x: step(x).backward())
        gradients += [parameter.grad for parameter in model.parameters()]
    return gradients, peak_bytes


def check(rank=0):
    """Compare a compiled step with eager PyTorch, and its order with that of the graph."""
    programs = []
    back = pmt.backend("70%", cache=False)
    rewrite = back.rewrite

    def noted(joint, *rest, **options):
        rewritten = rewrite(joint, *rest, **options)
        programs.append((joint.graph, rewritten.graph))
        return rewritten

    back.rewrite = noted
    expected, _ = train(None, rank)
    gradients, peak_bytes = train(back, rank)
    assert all(map(torch.equal, gradients, expected))
    (record,) = back.plans
    assert peak_bytes <= record.predicted_peak_bytes <= record.ram_budget_bytes
    assert record.recomputed > 0
    ((old, new),) = programs
    shapes = [
        [node.meta["val"].shape for node in graph.nodes if is_collective(node.target)]
        for graph in (old, new)
    ]
    assert len(shapes[0]) == 2 * DEPTH
    assert shapes[0] == shapes[1]
    # The results are first read where the step hands them over: all waits come after all sums.
    order = [node.target for node in new.nodes]
    last = max(k for k, target in enumerate(order) if is_collective(target))
    assert sum(map(is_wait, order[last:])) == 2 * DEPTH


def test_collectives_run_once_and_overlap_what_does_not_read_them():
    """With one process: eager's bits, within the budget."""
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        check()
    finally:
        distributed.destroy_process_group()


def check_in_a_group(rank, folder):
    """Run one of two processes."""
    store = distributed.FileStore(str(folder / "store"), 2)
    distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    check(rank)
    distributed.barrier()
    distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_have_the_bits_of_eager(tmp_path, monkeypatch, pytestconfig):
    """Gloo's own buffers are within the budget too."""
    monkeypatch.syspath_prepend(pytestconfig.rootpath)  # processes import this module by its name
    torch.multiprocessing.spawn(check_in_a_group, (tmp_path,), nprocs=2)
