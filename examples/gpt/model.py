"""A GPT of 11 million parameters on bytes, and a text that ships with Python: its library."""

import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

WIDTH, HEADS, BLOCKS, LENGTH, BATCH = 384, 6, 6, 128, 8


class Block(nn.Module):
    """Causal attention and a perceptron, each behind a norm and beside a residual path."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output, with the shape of its input."""
        heads = self.attend(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).flatten(2))
        return x + self.think(self.norms[1](x))


class Gpt(nn.Module):
    """Reads bytes, and returns the loss of the next byte at each position."""

    def __init__(self, width: int = WIDTH, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.byte, self.place = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)), nn.LayerNorm(width))
        self.head = nn.Linear(width, 256)

    def forward(self, text: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """Return the mean loss."""
        x = self.byte(text) + self.place.weight
        scores = self.head(self.blocks(x))
        return functional.cross_entropy(scores.flatten(0, 1), following.flatten())


def batches(count: int, rank: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return batches of random excerpts from the modules of the standard library."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)
    random = torch.Generator().manual_seed(rank)
    starts = torch.randint(len(text) - LENGTH, (count, BATCH), generator=random)
    rows = text[starts[..., None] + torch.arange(LENGTH + 1)].long()
    return [(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in rows]
