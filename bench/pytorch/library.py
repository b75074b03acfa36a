"""Networks of libraries with random weights, on which training methods are compared.

All but the U-Net are of the library transformers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.nn import functional

from mcu.networks import make_images
from pytorch.networks import unet

if TYPE_CHECKING:
    from collections.abc import Callable

TOKENS: Final = 8192
"""Size of the vocabulary."""
_CLASSES: Final = 10
BLOCKS: Final = ("BertLayer", "ConvNextLayer", "GPT2Block", "LlamaDecoderLayer", "ViTLayer")
"""Class names of the modules that checkpointing recomputes as units."""


class Logits(nn.Module):  # type: ignore[misc, unused-ignore]
    """A model of the library transformers that returns only its logits, one row for each label."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.model(x).logits.flatten(0, -2)  # type: ignore[no-any-return, unused-ignore]


@dataclass(frozen=True, kw_only=True)
class Size:
    """Sizes of networks and batches."""

    depth: int = 12
    """Number of blocks. In ConvNeXt the third stage has 3/4 of it, each other stage 1/4."""
    width: int = 768
    """Width of vectors; in ConvNeXt of the last stage, in the U-Net 12 times the first level."""
    batch: int = 8
    """Samples of a batch; ViT has twice as many."""
    length: int = 256
    """Number of tokens of a text."""
    side: int = 224
    """Height and width of images; the U-Net's are rounded down to a multiple of 32."""


REDUCED: Final = Size(width=256, batch=4, length=128, side=128)
"""Smaller networks and batches, for shared machines: a third of the width."""


def make_transformer(kind: str, size: Size) -> Any:
    """Return a network with random weights, its loss, and a batch.

    `kind` is the class in transformers of GPT-2 (without its suffix ``Model``), BERT, ViT, ConvNeXt
    or a decoder in the shape of Llama.
    """
    import transformers

    depth, width, heads = size.depth, size.width, size.width // 64
    block_options = {"num_hidden_layers": depth, "hidden_size": width, "num_attention_heads": heads}
    text_options = {"vocab_size": TOKENS, "bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
    class_options = {"num_labels": _CLASSES}
    settings: dict[str, dict[str, Any]] = {
        "GPT2LMHead": text_options | {"n_layer": depth, "n_embd": width, "n_head": heads},
        "LlamaForCausalLM": text_options | block_options | {
            "intermediate_size": 8 * width // 3 // 64 * 64, "num_key_value_heads": width // 128,
        },
        "BertForSequenceClassification": block_options | class_options | {
            "vocab_size": TOKENS, "intermediate_size": 4 * width,
        },
        "ViTForImageClassification": block_options | class_options | {
            "image_size": size.side, "intermediate_size": 4 * width,
        },
        "ConvNextForImageClassification": class_options | {
            "depths": [max(1, depth // 4), max(1, depth // 4), 3 * depth // 4, max(1, depth // 4)],
            "hidden_sizes": [width // divisor for divisor in (8, 4, 2, 1)],
        },
    }  # fmt: skip
    family = kind.partition("LMHead" if "LMHead" in kind else "For")[0]
    config = getattr(transformers, f"{family}Config")(**settings[kind])
    model = Logits(getattr(transformers, kind + "Model" * kind.endswith("LMHead"))(config))
    if "Image" in kind:
        image_count = 2 * size.batch if family == "ViT" else size.batch
        return model, functional.cross_entropy, make_images(image_count, size.side)
    x = torch.randint(TOKENS, (size.batch, size.length))
    label_count, class_count = (size.batch, _CLASSES) if family == "Bert" else (x.numel(), TOKENS)
    return model, functional.cross_entropy, (x, torch.randint(class_count, (label_count,)))


LIBRARY: Final[dict[str, Callable[[Size], Any]]] = {
    "gpt2-small": partial(make_transformer, "GPT2LMHead"),
    "bert-base": partial(make_transformer, "BertForSequenceClassification"),
    "vit-base": partial(make_transformer, "ViTForImageClassification"),
    "convnext-tiny": partial(make_transformer, "ConvNextForImageClassification"),
    "unet": lambda size: unet(size.batch, width=size.width // 12, size=size.side // 32 * 32),
    "llama": partial(make_transformer, "LlamaForCausalLM"),
}
"""Function that returns each network with its loss and a batch, by name."""


def find_constructor(name: str) -> Callable[[], Any]:
    """Return the constructor of a network; ``gpt2-small/4`` has four blocks and `REDUCED` sizes."""
    family, _, depth = name.partition("/")
    return partial(LIBRARY[family], replace(REDUCED, depth=int(depth)) if depth else Size())
