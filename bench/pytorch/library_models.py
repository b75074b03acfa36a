"""Steps of models as people train them: of transformers and diffusers, with random weights.

Each is a function without parameters that returns a `Step`. Libraries are imported inside; the
captures under ``bench/traced`` were made with transformers 5.23.0 and diffusers 0.42.1. What
transformers says on the way (Mamba has no fast kernels, a loss is the default) changes nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytorch.capture import Step

BATCH: Final = 8
"""Samples of a step, but for UNet2D."""
NOISY_BATCH: Final = 4
"""Samples of a step of UNet2D."""
WORDS: Final = 1000
"""Size of the vocabularies."""
CLASSES: Final = 10
"""Classes of images."""


def _of_transformers(kind: str, batch: dict[str, torch.Tensor], **sizes: Any) -> Step:
    """Return a step of a model of transformers, by its class, which has a loss of its own."""
    model = getattr(import_module("transformers"), kind)
    return model(model.config_class(**sizes)).train(), None, (batch,)


def _texts(length: int) -> dict[str, torch.Tensor]:
    """Return random tokens with a mask that keeps all, and themselves as targets."""
    tokens = torch.randint(5, WORDS, (BATCH, length))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def _images(size: int) -> dict[str, torch.Tensor]:
    """Return random square images and classes."""
    pixels = torch.randn(BATCH, 3, size, size)
    return {"pixel_values": pixels, "labels": torch.randint(0, CLASSES, (BATCH,))}


def bert() -> Step:
    """Return a step of BERT that classifies texts, 12 layers."""
    return _of_transformers(
        "BertForSequenceClassification",
        _texts(128) | {"labels": torch.randint(0, 2, (BATCH,))},
        vocab_size=WORDS,
        hidden_size=256,
        num_hidden_layers=12,
        num_attention_heads=4,
        intermediate_size=1024,
    )


def gpt2() -> Step:
    """Return a step of GPT-2, 6 layers."""
    return _of_transformers(
        "GPT2LMHeadModel",
        _texts(128),
        vocab_size=WORDS,
        n_embd=256,
        n_layer=6,
        n_head=4,
        n_positions=128,
        bos_token_id=1,
        eos_token_id=2,
    )


def llama() -> Step:
    """Return a step of Llama with grouped queries, 6 layers."""
    return _of_transformers(
        "LlamaForCausalLM",
        _texts(128),
        vocab_size=WORDS,
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=688,
    )


def t5() -> Step:
    """Return a step of T5, 3 layers of encoder and 3 of decoder."""
    return _of_transformers(
        "T5ForConditionalGeneration",
        _texts(64),
        vocab_size=WORDS,
        d_model=256,
        d_kv=64,
        d_ff=1024,
        num_layers=3,
        num_heads=4,
        decoder_start_token_id=0,
    )


def whisper() -> Step:
    """Return a step of Whisper, 6 layers of encoder and 6 of decoder."""
    sides = {
        f"{side}_{size}": value
        for side in ("encoder", "decoder")
        for size, value in (("layers", 6), ("attention_heads", 4), ("ffn_dim", 512))
    }
    return _of_transformers(
        "WhisperForConditionalGeneration",
        {
            "input_features": torch.randn(BATCH, 40, 300),
            "labels": torch.randint(5, WORDS, (BATCH, 32)),
        },
        vocab_size=WORDS,
        d_model=128,
        num_mel_bins=40,
        max_source_positions=150,
        max_target_positions=32,
        decoder_start_token_id=1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **sides,
    )


def vit() -> Step:
    """Return a step of ViT that classifies images, 12 layers."""
    return _of_transformers(
        "ViTForImageClassification",
        _images(64),
        hidden_size=192,
        num_hidden_layers=12,
        num_attention_heads=3,
        intermediate_size=768,
        image_size=64,
        patch_size=8,
        num_labels=CLASSES,
    )


def swin() -> Step:
    """Return a step of Swin that classifies images, 2, 2 and 4 layers."""
    return _of_transformers(
        "SwinForImageClassification",
        _images(64),
        image_size=64,
        patch_size=2,
        embed_dim=48,
        depths=(2, 2, 4),
        num_heads=(3, 6, 12),
        window_size=4,
        num_labels=CLASSES,
    )


class Mixing(nn.Module):  # type: ignore[misc, unused-ignore]
    """Block of the MLP-Mixer (Tolstikhin et al., 2021)."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(
            nn.Linear(tokens, tokens * 2), nn.GELU(), nn.Linear(tokens * 2, tokens)
        )
        self.channels = nn.Sequential(
            nn.Linear(width, width * 4), nn.GELU(), nn.Linear(width * 4, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):  # type: ignore[misc, unused-ignore]
    """MLP-Mixer that classifies square images."""

    def __init__(self, *, blocks: int, width: int, patch: int, size: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, patch, patch)
        self.blocks = nn.Sequential(*(Mixing((size // patch) ** 2, width) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        x = self.stem(x).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)).mean(1))


def mixer() -> Step:
    """Return a step of the MLP-Mixer, 12 blocks."""
    model = Mixer(blocks=12, width=256, patch=8, size=64)
    return model, functional.cross_entropy, tuple(_images(64).values())


def mobilenetv2() -> Step:
    """Return a step of MobileNetV2 on images of 96 x 96."""
    kind = "MobileNetV2ForImageClassification"
    return _of_transformers(kind, _images(96), image_size=96, num_labels=CLASSES)


def efficientnet() -> Step:
    """Return a step of EfficientNet-B0 on images of 64 x 64."""
    return _of_transformers(
        "EfficientNetForImageClassification",
        _images(64),
        width_coefficient=1.0,
        depth_coefficient=1.0,
        hidden_dim=1280,
        image_size=64,
        num_labels=CLASSES,
    )


class Denoiser(nn.Module):  # type: ignore[misc, unused-ignore]
    """A network of diffusers whose only result is what it finds."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.unet = network

    def forward(self, noisy: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        """Return the noise that is found in images."""
        found: torch.Tensor = self.unet(noisy, times).sample
        return found


def unet2d() -> Step:
    """Return a step of diffusers' UNet2D, which learns to find the noise in images of 32 x 32."""
    network = import_module("diffusers").UNet2DModel(
        sample_size=32,
        in_channels=3,
        out_channels=3,
        layers_per_block=2,
        block_out_channels=(32, 64, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )
    noisy = torch.randn(NOISY_BATCH, 3, 32, 32)
    times = torch.randint(0, 1000, (NOISY_BATCH,))
    return Denoiser(network).train(), functional.mse_loss, (noisy, times, torch.randn_like(noisy))


def mamba() -> Step:
    """Return a step of Mamba, 4 layers, whose scan over 16 tokens is unrolled."""
    texts = _texts(16)
    texts.pop("attention_mask")
    return _of_transformers(
        "MambaForCausalLM",
        texts,
        vocab_size=WORDS,
        hidden_size=64,
        num_hidden_layers=4,
        state_size=8,
    )


MODELS: Final[dict[str, Callable[[], Step]]] = {
    "bert12": bert,
    "gpt2": gpt2,
    "llama": llama,
    "t5": t5,
    "whisper": whisper,
    "vit": vit,
    "swin": swin,
    "mixer": mixer,
    "mobilenetv2": mobilenetv2,
    "efficientnet-b0": efficientnet,
    "unet2d": unet2d,
    "mamba": mamba,
}
"""What is captured, by name."""
WHOLE: Final = ("gpt2", "llama", "t5", "vit", "swin", "mixer")
"""Models that are captured with an optimizer, too: those whose file has less than 500 KB."""
