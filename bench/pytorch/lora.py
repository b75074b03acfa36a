"""One LoRA step of a Llama of 1.1 billion parameters in a process that could not hold them.

``python bench/pytorch/lora.py --out bench/results/$(date +%F)-lora.jsonl`` runs three processes.
`EAGER` trains with plain PyTorch. `FIRST` compiles the step and fills a cache; it takes several
times the model. `SECOND` starts from weights in mapped files and from that cache, with all frozen
weights on storage, and trains. The record says what each held, and whether the trained parameters
are those of eager PyTorch, bit by bit.

The shape is that of TinyLlama (Zhang et al., 2024, arXiv:2401.02385): 22 layers, 32 heads in 4
groups, widths of 2,048 and 5,632, 32,000 tokens. Weights are random, in bfloat16. Adapters (Hu et
al., 2021, arXiv:2106.09685) have rank 8, on queries and values.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

import poetmodel.torch as pmt
from harness import latest, parsed, record
from poetmodel.units import parse_size
from pytorch.process_memory import ProcessPeak, give_back_at_once, process_peak

KIND: Final = "lora"
EAGER, FIRST, SECOND = "eager", "first", "second"
"""The processes."""
WIDTH, HEADS, GROUPS, INNER, TOKENS = 2048, 32, 4, 5632, 32_000
RANK, SCALE = 8, 2.0
SEED = 0


class Adapted(nn.Module):  # type: ignore[misc, unused-ignore]
    """A frozen linear layer with a trained product of two small ones beside it."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, out, bias=False)
        self.down = nn.Linear(width, RANK, bias=False)
        self.up = nn.Linear(RANK, out, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of both."""
        return self.base(x) + SCALE * self.up(self.down(x))


class Layer(nn.Module):  # type: ignore[misc, unused-ignore]
    """Attention with rotated queries and keys in groups, and a gated perceptron."""

    def __init__(self) -> None:
        super().__init__()
        head = WIDTH // HEADS
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.query, self.value = Adapted(WIDTH, WIDTH), Adapted(WIDTH, GROUPS * head)
        self.key = nn.Linear(WIDTH, GROUPS * head, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Return the stream after this layer."""
        batch, length, _ = x.shape
        normed = self.norms[0](x)
        query, key, value = (
            of(normed).view(batch, length, heads, -1).transpose(1, 2)
            for of, heads in ((self.query, HEADS), (self.key, GROUPS), (self.value, GROUPS))
        )
        query, key = rotated(query, angles), rotated(key, angles)
        key, value = (each.repeat_interleave(HEADS // GROUPS, 1) for each in (key, value))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        normed = self.norms[1](x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Return heads with rotary embeddings (Su et al., 2021)."""
    left, right = x.chunk(2, -1)
    return x * angles.cos() + torch.cat((-right, left), -1) * angles.sin()


class Llama(nn.Module):  # type: ignore[misc, unused-ignore]
    """A language model of some layers, of which the adapters alone are trained."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(is_adapter(name))

    def forward(self, tokens: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Return what is expected of each next token."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, angles)
        return self.head(self.norm(x))


def is_adapter(name: str) -> bool:
    """Return whether a parameter is trained."""
    *_, module, _weight = name.split(".")
    return module in ("down", "up") and any(part in name for part in (".query.", ".value."))


def loss_of(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy, in single precision."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten())


def batch_of(length: int) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return tokens with the angles of their places, and the tokens wanted."""
    generator = torch.Generator().manual_seed(SEED)
    tokens, wanted = (torch.randint(TOKENS, (1, length), generator=generator) for _ in range(2))
    half = WIDTH // HEADS // 2
    rates = 10_000.0 ** -(torch.arange(half, dtype=torch.float32) / half)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * rates
    return (tokens, torch.cat((angles, angles), -1).bfloat16()), wanted


def save(folder: Path, layers: int) -> None:
    """Write the weights of a new model, each to a file of its own."""
    torch.set_default_dtype(torch.bfloat16)
    torch.manual_seed(SEED)
    for name, weight in Llama(layers).state_dict().items():
        (folder / name).write_bytes(weight.view(torch.int16).numpy().tobytes())


def model_in(folder: Path, layers: int) -> Llama:
    """Return the model whose weights are in files, each mapped by itself."""
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = Llama(layers)
    weights = {
        name: torch.from_file(
            str(folder / name), shared=False, size=weight.numel(), dtype=weight.dtype
        ).view(weight.shape)
        for name, weight in model.state_dict().items()
    }
    model.load_state_dict(weights, assign=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
    return model


def run(role: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train in this process; return what it took."""
    give_back_at_once()
    torch.set_num_threads(1)
    model = model_in(folder / "weights", options.layers)
    inputs, wanted = batch_of(options.length)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    times_s: list[float] = []
    losses: list[float] = []
    made: list[Any] = []

    def start() -> None:
        made.append(
            pmt.compile(
                model,
                loss_of,
                (*inputs, wanted),
                ram=options.ram,
                optimizer=optimizer,
                storage=folder / "storage",
                rollback=False,
                cache=folder / "cache",
            )
        )

    def eager(*batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(*batch[:-1]), batch[-1])
        loss.backward()
        optimizer.step()
        return loss

    def steps(count: int) -> None:
        step = made[0] if made else eager
        for _ in range(count):
            begin = time.perf_counter()
            losses.append(step(*inputs, wanted).item())
            times_s.append(time.perf_counter() - begin)

    begin = time.perf_counter()
    started = None if role == EAGER else process_peak(start)
    start_s = time.perf_counter() - begin
    steps(1)  # until then, what was read at the start is still mapped
    peak = process_peak(lambda: steps(options.steps - 1))
    digest = hashlib.sha256()
    for parameter in trained:
        digest.update(parameter.detach().view(torch.int16).numpy().tobytes())
    return {
        "role": role,
        "layers": options.layers,
        "length": options.length,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "trained": sum(parameter.numel() for parameter in trained),
        "ram_budget_bytes": None if role == EAGER else parse_size(options.ram, field="ram"),
        "plan_peak_bytes": made[0].compiled.peak_bytes if made else None,
        "start_s": start_s,
        "start_peak": None if started is None else _bytes(started),
        "steps_peak": _bytes(peak),
        "times_s": times_s,
        "losses": losses,
        "digest": digest.hexdigest(),
        "torch": torch.__version__,
    }


def _bytes(peak: ProcessPeak) -> dict[str, int]:
    return {"anonymous_bytes": peak.anonymous_bytes, "resident_bytes": peak.total_bytes}


def main() -> int:
    """Run the processes and write a record of each; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--length", type=int, default=64, help="tokens")
    parser.add_argument("--ram", default="700MiB", help="budget of the step, state included")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--role", choices=(EAGER, FIRST, SECOND), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    if "--role" in sys.argv:
        options = parser.parse_args()
        (options.folder / "storage").mkdir(exist_ok=True)
        sys.stdout.write(f"{json.dumps(run(options.role, options, options.folder))}\n")
        return 0
    options = parsed(parser, "lora.jsonl", None)
    records = latest(options.out)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        (Path(folder) / "weights").mkdir()
        save(Path(folder) / "weights", options.layers)
        given = ("--layers", options.layers, "--length", options.length, "--steps", options.steps)
        for role in (EAGER, FIRST, SECOND):
            command = [sys.executable, __file__, "--role", role, "--folder", folder, *given]
            command += ["--ram", options.ram]
            done = subprocess.run(
                list(map(str, command)), check=True, stdout=subprocess.PIPE, text=True
            )
            values = json.loads(done.stdout.splitlines()[-1])
            records.add(record(KIND, role, **values))
            sys.stdout.write(f"{role}: {values['steps_peak']['resident_bytes']:,} B resident\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
