"""Train a GPT within 60 % and 40 % of its memory by two ways, and compare with eager PyTorch.

``python gpt.py`` trains in all ways; ``python gpt.py "backend 60%"`` in one of them, and
``torchrun --nproc-per-node 2 gpt.py "backend 60%"`` in two processes.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import nn

import poetmodel.torch as pmt
from model import Gpt, batches

STEPS, OUT = 8, Path("out").resolve()
WAYS = ("eager", "backend 60%", "backend 40%", "compile 60%", "compile 40%")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
# The C library returns freed memory at once; otherwise it keeps some for later.
SETTINGS = {"OMP_NUM_THREADS": "1", "MALLOC_TRIM_THRESHOLD_": "65536"}
SETTINGS |= {"MALLOC_MMAP_THRESHOLD_": "65536"}


def make_step(
    way: str, model: nn.Module, example: tuple[torch.Tensor, ...]
) -> Callable[..., torch.Tensor]:
    """Return a function that trains on a batch, and returns the loss."""
    kind, _, ram = way.partition(" ")
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    if kind == "compile":  # the whole step: forward, backward and update, with state on storage
        return pmt.compile(model, None, example, ram=ram, optimizer=optimizer, storage=OUT / way)
    if kind == "backend":  # your loop stays as it is
        model.compile(backend=pmt.backend(ram=ram), fullgraph=True, dynamic=False)
    net = nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else model

    def step(text: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        loss = net(text, following)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def memory_bytes() -> int:
    """Return the memory of this process without files, as Linux counts it."""
    words = Path("/proc/self/status").read_text().split()
    return 1024 * int(words[words.index("RssAnon:") + 1])


class Watch(threading.Thread):
    """Looks every two milliseconds for the peak of this process's memory."""

    peak_bytes = 0

    def run(self) -> None:
        """Look until the process ends."""
        while True:
            self.peak_bytes = max(self.peak_bytes, memory_bytes())
            time.sleep(0.002)


def train(way: str) -> dict:
    """Train in one way; return the losses, and the peak and times of a step."""
    if "RANK" in os.environ:  # of torchrun
        dist.init_process_group("gloo")
    data = batches(STEPS, int(os.environ.get("RANK", "0")))
    torch.manual_seed(0)
    kind = way.partition(" ")[0]  # a small step first, which loads all that this way imports
    make_step(f"{kind} 100%", Gpt(width=48, blocks=1), data[0])(*data[0])
    start_bytes = memory_bytes()
    torch.manual_seed(0)
    step = make_step(way, Gpt(), data[0])
    watch, losses, times = Watch(daemon=True), [], []
    for number, batch in enumerate(data):
        if number == 2:  # the first steps plan, and make moments
            watch.start()
        start = time.perf_counter(), time.process_time()
        losses.append(step(*batch).item())
        times.append((time.perf_counter() - start[0], time.process_time() - start[1]))
    seconds = [sorted(column[2:])[STEPS // 2 - 1] for column in zip(*times, strict=True)]
    peak_bytes = watch.peak_bytes - start_bytes
    if kind == "compile":
        step.close()
    return {"losses": losses, "peak_bytes": peak_bytes, "seconds": seconds}


def run(way: str, *launcher: str) -> dict:
    """Train in one way in a process of its own, or in those of a launcher; return its results."""
    command = [sys.executable, *launcher, __file__, way]
    environment = os.environ | SETTINGS
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)  # noqa: S603
    return json.loads(done.stdout.splitlines()[-1])


def compare() -> None:
    """Train in all ways; print a table, and draw the losses and peaks."""
    results = {way: run(way) for way in WAYS}
    results |= {f"{way}, 2 processes": run(way, *TORCHRUN) for way in WAYS[:2]}
    _, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5))
    print("| | peak | time of a step | of it processor | losses |\n|---|---:|---:|---:|---|")
    for number, (way, result) in enumerate(results.items()):
        eager = results[f"eager{way[way.find(',') :]}" if "," in way else "eager"]["losses"]
        equal = "equal to eager's" if result["losses"] == eager else "other than eager's"
        wall_s, processor_s = result["seconds"]
        peak = result["peak_bytes"] / 2**20
        print(f"| {way} | {peak:.0f} MiB | {wall_s:.2f} s | {processor_s:.2f} s | {equal} |")
        if way in WAYS:  # thinner from line to line, as all lie on each other
            left.plot(result["losses"], lw=12 - 2 * number, label=way)
        right.barh(way, peak)
    left.set(xlabel="step", ylabel="loss")
    left.legend(frameon=False, fontsize="small")
    right.set(xlabel="peak [MiB]")
    right.invert_yaxis()
    plt.tight_layout()
    plt.savefig(OUT / "curves.svg")


if __name__ == "__main__":
    OUT.mkdir(exist_ok=True)
    if len(sys.argv) < 2:
        compare()
    elif os.environ.get("RANK", "0") == "0":
        print(json.dumps(train(sys.argv[1])))
    else:
        train(sys.argv[1])
