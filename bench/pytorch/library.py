"""Networks of transformers, with random weights, that training methods are compared on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.nn import functional

from mcu.networks import images
from pytorch.networks import unet

if TYPE_CHECKING:
    from collections.abc import Callable

TOKENS: Final = 8192
"""How many there are."""
_CLASSES: Final = 10
BLOCKS: Final = ("BertLayer", "ConvNextLayer", "GPT2Block", "LlamaDecoderLayer", "ViTLayer")
"""Names of the modules that checkpointing recomputes as one."""


class Logits(nn.Module):  # type: ignore[misc, unused-ignore]
    """What a model of transformers says of its input, and nothing else; a row for each label."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.model(x).logits.flatten(0, -2)  # type: ignore[no-any-return, unused-ignore]


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large networks and batches are."""

    depth: int = 12
    """Blocks; a third of them in the stages of ConvNeXt that have fewer."""
    width: int = 768
    """Of vectors; that of the last stage of ConvNeXt."""
    batch: int = 8
    length: int = 256
    """Tokens of a text."""
    side: int = 224
    """Of images."""


REDUCED: Final = Size(width=256, batch=4, length=128, side=128)
"""For a machine that others use: a third of the width."""


def _of_text(size: Size, model: nn.Module, *, classes: int = TOKENS) -> Any:
    x = torch.randint(TOKENS, (size.batch, size.length))
    labels = x.numel() if classes == TOKENS else size.batch
    return Logits(model), functional.cross_entropy, (x, torch.randint(classes, (labels,)))


def gpt2(size: Size) -> Any:
    """Return GPT-2 small, with fewer tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=size.depth,
        n_embd=size.width,
        n_head=size.width // 64,
        vocab_size=TOKENS,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return _of_text(size, GPT2LMHeadModel(config))


def bert(size: Size) -> Any:
    """Return BERT-base, with fewer tokens."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        num_hidden_layers=size.depth,
        hidden_size=size.width,
        intermediate_size=4 * size.width,
        num_attention_heads=size.width // 64,
        vocab_size=TOKENS,
        num_labels=_CLASSES,
    )
    return _of_text(size, BertForSequenceClassification(config), classes=_CLASSES)


def llama(size: Size) -> Any:
    """Return a decoder in the shape of Llama, of the width of GPT-2 small."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=size.depth,
        vocab_size=TOKENS,
        hidden_size=size.width,
        intermediate_size=8 * size.width // 3 // 64 * 64,
        num_attention_heads=size.width // 64,
        num_key_value_heads=size.width // 128,
        use_cache=False,
    )
    return _of_text(size, LlamaForCausalLM(config))


def vit(size: Size) -> Any:
    """Return ViT-B/16."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        num_hidden_layers=size.depth,
        hidden_size=size.width,
        intermediate_size=4 * size.width,
        num_attention_heads=size.width // 64,
        image_size=size.side,
        num_labels=_CLASSES,
    )
    batch = images(2 * size.batch, size.side)
    return Logits(ViTForImageClassification(config)), functional.cross_entropy, batch


def convnext(size: Size) -> Any:
    """Return ConvNeXt-T, whose third stage has three quarters of the depth."""
    from transformers import ConvNextConfig, ConvNextForImageClassification

    less, more = max(1, size.depth // 4), 3 * size.depth // 4
    config = ConvNextConfig(
        depths=[less, less, more, less],
        hidden_sizes=[size.width // each for each in (8, 4, 2, 1)],
        num_labels=_CLASSES,
    )
    batch = images(size.batch, size.side)
    return Logits(ConvNextForImageClassification(config)), functional.cross_entropy, batch


LIBRARY: Final[dict[str, Callable[[Size], Any]]] = {
    "gpt2-small": gpt2,
    "bert-base": bert,
    "vit-base": vit,
    "convnext-tiny": convnext,
    "unet": lambda size: unet(size.batch, width=size.width // 12, size=size.side // 32 * 32),
    "llama": llama,
}
"""Networks by name."""


def network(name: str) -> Callable[[], Any]:
    """Return what makes a network: whole, or reduced to so many blocks: ``gpt2-small/4``."""
    own, _, depth = name.partition("/")
    return partial(LIBRARY[own], replace(REDUCED, depth=int(depth)) if depth else Size())
