"""Memory of a process with a compiled step, as the kernel counts it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc"),
]

PROGRAM = """
import gc, json
from pathlib import Path
import torch
from torch import nn
import poetmodel.torch as pmt
from poetmodel.torch.graph.tensors import heap_peak_bytes

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.Tanh())))
x, y = torch.randn(2, 4096, 256)
loss = lambda out, target: (out - target).square().mean()
step = pmt.compile(model, loss, (x, y), ram="40%", time_limit=20)

def resident_bytes(key):
    words = Path("/proc/self/status").read_text().split()
    return 1024 * int(words[words.index(key) + 1])

def rise(work):
    model.zero_grad(set_to_none=True)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    before = resident_bytes("VmRSS:")
    work()
    return resident_bytes("VmHWM:") - before

def peaks(work):
    rise(work)
    model.zero_grad(set_to_none=True)
    return {"process": rise(work), "heap": heap_peak_bytes(work)}

print(json.dumps({
    "compiled": peaks(lambda: step(x, y)),
    "eager": peaks(lambda: loss(model(x), y).backward()),
    "budget": step.compiled.result.problem.ram_budget_bytes,
    "gradients": sum(4 * parameter.numel() for parameter in model.parameters()),
}))
"""
RETURNED = {"MALLOC_TRIM_THRESHOLD_": "16384", "MALLOC_MMAP_THRESHOLD_": "16384"}
"""Let the C library return freed memory at once: it keeps some for later otherwise."""
SLACK_BYTES = 2 << 20
"""Other pages of a process that come and go."""


def test_process_peak_is_that_of_the_heap():
    """A step within 40 % raises the peak of its process by at most its budget and gradients.

    Eager PyTorch raises it by its heap peak, which is more than twice the budget.
    """
    environment = os.environ | RETURNED | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    compiled, eager = found["compiled"], found["eager"]
    allowed = found["budget"] + found["gradients"]
    assert compiled["heap"] <= allowed
    assert compiled["process"] <= allowed + SLACK_BYTES
    assert abs(compiled["process"] - compiled["heap"]) <= found["gradients"] + SLACK_BYTES
    assert abs(eager["process"] - eager["heap"]) <= found["gradients"] + SLACK_BYTES
    assert eager["process"] > 2 * allowed
