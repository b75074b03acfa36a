"""Networks of transformers with random weights, on which training methods are compared."""

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
"""Size of the vocabulary."""
_CLASSES: Final = 10
BLOCKS: Final = ("BertLayer", "ConvNextLayer", "GPT2Block", "LlamaDecoderLayer", "ViTLayer")
"""Class names of the modules that checkpointing recomputes as units."""


class Logits(nn.Module):  # type: ignore[misc, unused-ignore]
    """A model of transformers that returns only its logits, one row for each label."""

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
    """Blocks; three quarters of them in the third stage of ConvNeXt."""
    width: int = 768
    """Width of vectors; in ConvNeXt that of the last stage."""
    batch: int = 8
    length: int = 256
    """Tokens of a text."""
    side: int = 224
    """Height and width of images."""


REDUCED: Final = Size(width=256, batch=4, length=128, side=128)
"""A third of the width, for shared machines."""


def of_transformers(kind: str, size: Size) -> Any:
    """Return GPT-2 small, BERT-base, ViT-B/16, ConvNeXt-T, or a decoder in the shape of Llama."""
    import transformers

    depth, width, heads = size.depth, size.width, size.width // 64
    blocks = {"num_hidden_layers": depth, "hidden_size": width, "num_attention_heads": heads}
    text = {"vocab_size": TOKENS, "bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
    classes = {"num_labels": _CLASSES}
    settings: dict[str, dict[str, Any]] = {
        "GPT2LMHead": text | {"n_layer": depth, "n_embd": width, "n_head": heads},
        "LlamaForCausalLM": text | blocks | {
            "intermediate_size": 8 * width // 3 // 64 * 64, "num_key_value_heads": width // 128,
        },
        "BertForSequenceClassification": blocks | classes | {
            "vocab_size": TOKENS, "intermediate_size": 4 * width,
        },
        "ViTForImageClassification": blocks | classes | {
            "image_size": size.side, "intermediate_size": 4 * width,
        },
        "ConvNextForImageClassification": classes | {
            "depths": [max(1, depth // 4), max(1, depth // 4), 3 * depth // 4, max(1, depth // 4)],
            "hidden_sizes": [width // each for each in (8, 4, 2, 1)],
        },
    }  # fmt: skip
    family = kind.partition("LMHead" if "LMHead" in kind else "For")[0]
    config = getattr(transformers, f"{family}Config")(**settings[kind])
    model = Logits(getattr(transformers, kind + "Model" * kind.endswith("LMHead"))(config))
    if "Image" in kind:
        pictures = 2 * size.batch if family == "ViT" else size.batch
        return model, functional.cross_entropy, images(pictures, size.side)
    x = torch.randint(TOKENS, (size.batch, size.length))
    labels, most = (size.batch, _CLASSES) if family == "Bert" else (x.numel(), TOKENS)
    return model, functional.cross_entropy, (x, torch.randint(most, (labels,)))


LIBRARY: Final[dict[str, Callable[[Size], Any]]] = {
    "gpt2-small": partial(of_transformers, "GPT2LMHead"),
    "bert-base": partial(of_transformers, "BertForSequenceClassification"),
    "vit-base": partial(of_transformers, "ViTForImageClassification"),
    "convnext-tiny": partial(of_transformers, "ConvNextForImageClassification"),
    "unet": lambda size: unet(size.batch, width=size.width // 12, size=size.side // 32 * 32),
    "llama": partial(of_transformers, "LlamaForCausalLM"),
}
"""Networks by name."""


def network(name: str) -> Callable[[], Any]:
    """Return the constructor of a network, whole or with fewer blocks: ``gpt2-small/4``."""
    own, _, depth = name.partition("/")
    return partial(LIBRARY[own], replace(REDUCED, depth=int(depth)) if depth else Size())
