"""Program of each process of a run: train one network within one wrapper by several methods.

``python -m torch.distributed.run --standalone --nproc-per-node 2 ranks.py WAY CAP SHARES FILE``

WAY is a wrapper of `pytorch.processes`, CAP the bucket size of DDP [MB], and SHARES are budgets as
fractions of eager's peak. The first process writes the records of all processes to FILE as JSON.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from poetmodel import torch as pmt
from poetmodel.errors import PoetModelError
from poetmodel.torch.graph.tensors import heap_peak_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

WORDS, WIDTH, HEADS, BLOCKS, TEXTS, LENGTH = 256, 128, 4, 6, 8, 128
"""Vocabulary, width, heads and blocks of the network; texts of a batch, tokens of a text."""
STEPS: Final = 3
"""Number of timed steps, each paired with one of eager; three untimed steps are before them."""
OUTSIDE_BYTES: Final = 3 * TEXTS * LENGTH * WORDS * 4 + 2 * TEXTS * LENGTH * WIDTH * 4
"""Bytes of embeddings, logits and loss, which are outside if only blocks are compiled [B]."""
_OPTIONS: Final = {"fullgraph": True, "dynamic": False}


class Block(nn.Module):  # type: ignore[misc, unused-ignore]
    """A block of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the activations after the block."""
        projections = self.qkv(self.first(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in projections)
        attention = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.second(x))))


class Transformer(nn.Module):  # type: ignore[misc, unused-ignore]
    """A small language model with optional checkpointing of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.is_checkpointed = False

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        activations = self.words(x)
        for block in self.blocks:
            if self.is_checkpointed:
                activations = checkpoint(block, activations, use_reentrant=False)
            else:
                activations = block(activations)
        return functional.cross_entropy(
            self.head(self.norm(activations)).flatten(0, 1), y.flatten()
        )


def wrap_model(
    way: str, model: Transformer, cap_mb: float, backend: pmt.Backend | None
) -> nn.Module:
    """Wrap a model; with a back end, compile the blocks or the model inside the wrapper."""
    is_by_block = way in ("blocks", "fsdp", "fsdp-bf16")
    parts = list(model.blocks) if is_by_block else [model]
    if backend is not None:
        for part in parts:
            part.compile(backend=backend, **_OPTIONS)
    if way.startswith("ddp"):
        is_static = way == "ddp-static"
        return DistributedDataParallel(model, bucket_cap_mb=cap_mb, static_graph=is_static)
    if way.startswith("fsdp"):
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy()
        if way == "fsdp-bf16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks if is_by_block else ():
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    return model


class Training:
    """One training method in one wrapper, with its model, optimizer and losses.

    `ram` is the budget of the back end [B], None for eager. Creating an object resets Dynamo.
    """

    def __init__(self, way: str, cap_mb: float, *, ram: int | None, checkpointed: bool) -> None:
        torch._dynamo.reset()  # noqa: SLF001 - not public
        torch._dynamo.config.optimize_ddp = way != "ddp-whole"  # noqa: SLF001 - documented by PyTorch
        torch.manual_seed(0)
        outside = OUTSIDE_BYTES if way in ("blocks", "fsdp", "fsdp-bf16") else None
        self.back = None if ram is None else pmt.backend(ram, outside=outside)
        self._model = Transformer()
        self._model.is_checkpointed = checkpointed
        self.run = wrap_model(way, self._model, cap_mb, self.back)
        self._is_accumulated = way == "ddp-no-sync"
        self._optimizer = torch.optim.AdamW(self._model.parameters(), 1e-3)
        self._random = torch.Generator().manual_seed(distributed.get_rank())
        self.losses: list[float] = []
        self.extra_bytes = 0
        """Bytes to add to the peak of a step: buckets of DDP, minus the input of blocks [B]. With
        ``ddp-no-sync``, accumulated gradients have the size of the buckets, and 0 is added."""
        if outside is not None:
            self.extra_bytes = -TEXTS * LENGTH * WIDTH * 4
        if way.startswith("ddp") and not self._is_accumulated:
            self.extra_bytes = sum(p.nbytes for p in self._model.parameters())

    def step(self, call_passes: Callable[[Callable[[], None]], Any] = lambda work: work()) -> Any:
        """Train on one batch, or two with ``ddp-no-sync``, and append the losses.

        `call_passes` calls the forward and backward passes; its result is returned.
        """
        self._optimizer.zero_grad()
        gc.collect()
        batches = [self._make_batch() for _ in range(1 + self._is_accumulated)]
        result = call_passes(partial(self._execute_passes, batches))
        self._optimizer.step()
        return result

    def _make_batch(self) -> list[torch.Tensor]:
        shape = (TEXTS, LENGTH)
        return [torch.randint(0, WORDS, shape, generator=self._random) for _ in range(2)]

    def _execute_passes(self, batches: list[list[torch.Tensor]]) -> None:
        for number, (x, y) in enumerate(batches):
            is_last = number == len(batches) - 1
            with nullcontext() if is_last else self.run.no_sync():
                loss = self.run(x, y)
                loss.backward()
            self.losses.append(float(loss.detach()))
            del loss

    def copy_weights(self) -> list[torch.Tensor]:
        """Return copies of all weights, whole if they are sharded."""
        parameters = self._model.parameters()
        full_weights = (getattr(p, "full_tensor", lambda p=p: p)() for p in parameters)
        return [weight.detach().clone() for weight in full_weights]


def measure_training(
    training: Training, reference: Training | None = None
) -> tuple[dict[str, Any], list[Any]]:
    """Execute and measure the steps of a method; return record fields, and losses and weights.

    Peaks include buckets of DDP. ``first_heap_peak_bytes`` is the peak of a step whose calls are
    not known to the back end, as in the first step. ``ratio`` is that of CPU times to steps of
    `reference`, which are executed too; 1 without a reference.
    """
    for _ in range(3):
        training.step()
    pairs = []
    for _ in range(STEPS):
        time_s = _processor_s(training)
        pairs.append((time_s, time_s if reference is None else _processor_s(reference)))
    peaks = [training.step(heap_peak_bytes)]
    if training.back is not None:
        training.back._live.last_steps.clear()  # noqa: SLF001 - the next step is like the first
    peaks.append(training.step(heap_peak_bytes))
    results = [*training.losses, *training.copy_weights()]
    facts: dict[str, Any] = {
        "heap_peak_bytes": peaks[0] + training.extra_bytes,
        "first_heap_peak_bytes": peaks[1] + training.extra_bytes,
        "processor_s": min(own_s for own_s, _ in pairs),
        "ratio": median(own_s / reference_s for own_s, reference_s in pairs),
    }
    if training.back is not None:
        facts["summary"] = training.back.summary()
    return facts, results


def _processor_s(training: Training) -> float:
    begin_s = time.process_time()
    training.step()
    return time.process_time() - begin_s


def main(way: str, cap_mb: float, shares: list[float], file: str) -> None:
    """Execute eager, checkpointing, and the back end at each budget; write their records.

    Ends this process.
    """
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    make_training = partial(Training, way, cap_mb)
    eager = make_training(ram=None, checkpointed=False)
    facts, expected = measure_training(eager)
    methods = [{"method": "eager", **facts}]
    eager_peak_bytes = _max_over_processes(facts["heap_peak_bytes"])
    budgets: list[tuple[str, float, int]] = [
        ("backend", share, int(share * eager_peak_bytes)) for share in shares
    ]
    checkpoint_facts, _ = measure_training(make_training(ram=None, checkpointed=True), eager)
    methods.append({"method": "checkpoint", **checkpoint_facts})
    peak_bytes = _max_over_processes(checkpoint_facts["heap_peak_bytes"])
    budgets.append(("backend@checkpoint", peak_bytes / eager_peak_bytes, peak_bytes))
    for method, share, ram in budgets:
        distributed.barrier()
        fields: dict[str, Any] = {"method": method, "share": share, "budget_bytes": ram}
        try:
            facts, results = measure_training(make_training(ram=ram, checkpointed=False), eager)
        except (PoetModelError, torch._dynamo.exc.BackendCompilerFailed) as error:  # noqa: SLF001
            fields |= {"refused": str(getattr(error, "inner_exception", error))}
        else:
            is_equal = all(map(_is_equal, results, expected))
            fields |= {**facts, "equal": is_equal}
        methods.append(fields)
        _write_records(
            methods, file
        )  # already here, because after a refusal a wrapper may end the process
    distributed.barrier()
    distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # without waiting for threads of the profiler


def _max_over_processes(number: int) -> int:
    """Return the maximum of a number over all processes; waits for all of them."""
    gathered: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(gathered, number)
    return int(max(gathered))


def _write_records(methods: list[dict[str, Any]], file: str) -> None:
    gathered: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(gathered, methods)
    if distributed.get_rank() == 0:
        Path(file).write_text(json.dumps(gathered), encoding="utf-8")


def _is_equal(value: Any, expected: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return bool(torch.equal(value, expected))
    return bool(value == expected)


if __name__ == "__main__":
    _way, _cap, _shares, _file = sys.argv[1:]
    main(_way, float(_cap), [float(share) for share in _shares.split(",")], _file)
