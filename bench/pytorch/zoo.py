"""Models of other libraries that captures are tried on: small ones, with random weights.

Each is a function without parameters that returns `Trial`; what it needs is imported inside.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A model with what it is trained on."""

    model: nn.Module
    loss_fn: Callable[..., torch.Tensor] | None = None
    inputs: tuple[Any, ...]
    other: tuple[Any, ...]
    """Inputs of the same form: other values, and another mask where there is one."""


WORDS: Final = 64
"""Size of the vocabularies."""
LENGTH: Final = 16
"""Tokens of a text."""
SMALL: Final = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
"""What most configurations of transformers call their sizes."""


def _texts(*lengths: int) -> dict[str, torch.Tensor]:
    """Return random tokens, of which a mask keeps as many as each text has."""
    tokens = torch.randint(5, WORDS, (len(lengths), LENGTH))
    mask = torch.arange(LENGTH) < torch.tensor(lengths)[:, None]
    return {"input_ids": tokens, "attention_mask": mask.long()}


def _batches(**more: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Return two batches of texts whose masks differ, with other keys made of each."""
    batches = [_texts(LENGTH, 10), _texts(12, 5)]
    found = [{**batch, **{key: make(batch) for key, make in more.items()}} for batch in batches]
    return {"inputs": (found[0],), "other": (found[1],)}


def _language_model(batch: dict[str, Any]) -> torch.Tensor:
    """Return the tokens as targets, those that are masked left out."""
    return batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)


def _classes(_: dict[str, Any]) -> torch.Tensor:
    return torch.randint(0, 2, (2,))


def _checkpointed(trial: Trial) -> Trial:
    trial.model.gradient_checkpointing_enable()
    return trial


def _of_transformers(kind: str, sizes: dict[str, Any], batches: dict[str, Any]) -> Trial:
    """Return a model of transformers: its class is `kind`, in front of ``For``."""
    library = import_module("transformers")
    model = getattr(library, kind)
    config = model.config_class(**sizes)
    return Trial(model=model(config).train(), **batches)


def bert() -> Trial:
    """Return BERT that classifies texts."""
    return _of_transformers("BertForSequenceClassification", SMALL, _batches(labels=_classes))


def distilbert() -> Trial:
    """Return DistilBERT that classifies texts."""
    sizes = {"vocab_size": WORDS, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}
    return _of_transformers("DistilBertForSequenceClassification", sizes, _batches(labels=_classes))


def gpt2() -> Trial:
    """Return GPT-2."""
    sizes = {"vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LENGTH}
    sizes |= {"bos_token_id": 1, "eos_token_id": 2}
    return _of_transformers("GPT2LMHeadModel", sizes, _batches(labels=_language_model))


def llama() -> Trial:
    """Return Llama with grouped queries."""
    sizes = {**SMALL, "num_key_value_heads": 2}
    return _of_transformers("LlamaForCausalLM", sizes, _batches(labels=_language_model))


def mixtral(**options: Any) -> Trial:
    """Return Mixtral, whose tokens choose their experts."""
    sizes = {**SMALL, "num_key_value_heads": 2, "num_local_experts": 4, **options}
    return _of_transformers("MixtralForCausalLM", sizes, _batches(labels=_language_model))


_GROUPED: Final = {**SMALL, "num_key_value_heads": 2, "head_dim": 8}
_CAUSAL: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "Mistral": ("MistralForCausalLM", {**_GROUPED, "sliding_window": 8}),
    "Qwen3": ("Qwen3ForCausalLM", _GROUPED),
    "Qwen3-MoE": (
        "Qwen3MoeForCausalLM",
        {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "Gemma 2": ("Gemma2ForCausalLM", {**_GROUPED, "sliding_window": 8}),
    "Phi-3": ("Phi3ForCausalLM", {**SMALL, "num_key_value_heads": 2, "pad_token_id": 0}),
    "GPT-NeoX": ("GPTNeoXForCausalLM", SMALL),
    "OPT": (
        "OPTForCausalLM",
        {
            "vocab_size": WORDS,
            "hidden_size": 32,
            "word_embed_proj_dim": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 64,
            "max_position_embeddings": 2 * LENGTH,
        },
    ),
    "BLOOM": (
        "BloomForCausalLM",
        {"vocab_size": WORDS, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    ),
}
"""More language models: class and sizes."""
_ENCODERS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "RoBERTa": (
        "RobertaForSequenceClassification",
        {**SMALL, "max_position_embeddings": 2 * LENGTH, "pad_token_id": 1},
    ),
    "ALBERT": ("AlbertForSequenceClassification", {**SMALL, "embedding_size": 32}),
    "ELECTRA": ("ElectraForSequenceClassification", {**SMALL, "embedding_size": 32}),
    "DeBERTa-v2": (
        "DebertaV2ForSequenceClassification",
        {**SMALL, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    ),
    "ModernBERT": (
        "ModernBertForSequenceClassification",
        {**SMALL, "local_attention": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
         "cls_token_id": 1, "sep_token_id": 2},
    ),
}  # fmt: skip
"""More encoders: class and sizes."""


def language_model(name: str) -> Trial:
    """Return a language model."""
    return _of_transformers(*_CAUSAL[name], _batches(labels=_language_model))


def encoder(name: str) -> Trial:
    """Return an encoder that classifies texts."""
    return _of_transformers(*_ENCODERS[name], _batches(labels=_classes))


def bart() -> Trial:
    """Return BART: encoder and decoder."""
    sizes: dict[str, Any] = {"vocab_size": WORDS, "d_model": 32}
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_layers": 2, f"{part}_attention_heads": 4, f"{part}_ffn_dim": 64}
    return _of_transformers("BartForConditionalGeneration", sizes, _batches(labels=_language_model))


def t5() -> Trial:
    """Return T5: encoder and decoder."""
    sizes = {"vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2}
    sizes |= {"num_heads": 4, "decoder_start_token_id": 0}
    return _of_transformers("T5ForConditionalGeneration", sizes, _batches(labels=_language_model))


def mamba() -> Trial:
    """Return Mamba."""
    sizes = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
    return _of_transformers("MambaForCausalLM", sizes, _batches(labels=_language_model))


def whisper() -> Trial:
    """Return Whisper: sound to text."""
    sizes = {
        "vocab_size": WORDS,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "num_mel_bins": 8,
        "max_source_positions": 30,
        "max_target_positions": LENGTH,
        "decoder_start_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }

    def batch() -> dict[str, torch.Tensor]:
        texts = torch.randint(5, WORDS, (2, LENGTH))
        return {"input_features": torch.randn(2, 8, 60), "labels": texts}

    batches = {"inputs": (batch(),), "other": (batch(),)}
    return _of_transformers("WhisperForConditionalGeneration", sizes, batches)


def wav2vec2(kind: str = "Wav2Vec2ForCTC", **options: Any) -> Trial:
    """Return Wav2Vec2, or another of its family, that writes what it hears."""
    sizes = {
        **SMALL,
        "conv_dim": (16, 16),
        "conv_kernel": (10, 3),
        "conv_stride": (5, 2),
        "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 4,
        "pad_token_id": 0,
        **options,
    }

    def batch(*lengths: int) -> dict[str, torch.Tensor]:
        mask = torch.arange(800) < torch.tensor(lengths)[:, None]
        labels = torch.randint(1, WORDS, (2, 6))
        return {
            "input_values": torch.randn(2, 800),
            "attention_mask": mask.long(),
            "labels": labels,
        }

    batches = {"inputs": (batch(800, 500),), "other": (batch(700, 600),)}
    return _of_transformers(kind, sizes, batches)


def _images(size: int, **more: Callable[[], torch.Tensor]) -> dict[str, Any]:
    """Return two batches of images by name, with other keys."""
    found = [
        {
            "pixel_values": torch.randn(2, 3, size, size),
            **{key: make() for key, make in more.items()},
        }
        for _ in range(2)
    ]
    return {"inputs": (found[0],), "other": (found[1],)}


def _picture_classes() -> torch.Tensor:
    return torch.randint(0, 2, (2,))


def vit() -> Trial:
    """Return a vision transformer that classifies images."""
    sizes = {**SMALL, "image_size": 32, "patch_size": 8}
    return _of_transformers(
        "ViTForImageClassification", sizes, _images(32, labels=_picture_classes)
    )


def swin() -> Trial:
    """Return Swin, whose windows shift."""
    sizes = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": (2, 2)}
    sizes |= {"num_heads": (2, 4), "window_size": 4}
    return _of_transformers(
        "SwinForImageClassification", sizes, _images(32, labels=_picture_classes)
    )


def segformer() -> Trial:
    """Return Segformer that segments images."""
    sizes = {"hidden_sizes": (8, 16, 16, 32), "depths": (1, 1, 1, 1), "decoder_hidden_size": 16}
    sizes |= {"num_attention_heads": (1, 2, 2, 4), "num_labels": 3}
    labels = partial(torch.randint, 0, 3, (2, 64, 64))
    return _of_transformers("SegformerForSemanticSegmentation", sizes, _images(64, labels=labels))


_DETECTED: Final = {"num_queries": 5, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1}


def _detection_sizes(kind: str) -> dict[str, Any]:
    if kind == "YolosForObjectDetection":
        return {**SMALL, "image_size": [32, 32], "patch_size": 8, "num_detection_tokens": 5}
    library = import_module("transformers")
    backbone = library.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic",
        out_features=["stage2"],
    )  # fmt: skip
    return {
        **_DETECTED,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "use_timm_backbone": False,
        "use_pretrained_backbone": False,
        "backbone_config": backbone,
        "backbone": None,
    }


def detector(kind: str) -> Trial:
    """Return a detector that is trained by a loss on its boxes and classes."""

    def loss(found: Any, target: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(found.pred_boxes, target) + found.logits.square().mean()

    def batch() -> tuple[Any, ...]:
        return torch.randn(2, 3, 32, 32), torch.rand(2, 5, 4)

    batches = {"inputs": batch(), "other": batch(), "loss_fn": loss}
    return _of_transformers(kind, _detection_sizes(kind), batches)


def matching_detector(kind: str) -> Trial:
    """Return a detector with the loss of its own, which matches boxes outside of PyTorch."""

    def batch() -> tuple[Any, ...]:
        labels = [{"class_labels": torch.tensor([1]), "boxes": torch.rand(1, 4)} for _ in range(2)]
        return ({"pixel_values": torch.randn(2, 3, 32, 32), "labels": labels},)

    batches = {"inputs": batch(), "other": batch()}
    return _of_transformers(kind, _detection_sizes(kind), batches)


def lora() -> Trial:
    """Return BERT with PEFT's LoRA: what is trained is small, and the rest frozen."""
    library = import_module("peft")
    trial = bert()
    config = library.LoraConfig(
        task_type="SEQ_CLS", r=4, lora_dropout=0.1, target_modules=["query", "value"]
    )
    model = library.get_peft_model(trial.model, config)
    return Trial(model=model.train(), inputs=trial.inputs, other=trial.other)


class Autocast(nn.Module):  # type: ignore[misc, unused-ignore]
    """A model that runs under autocast to bfloat16."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss."""
        with torch.autocast("cpu", torch.bfloat16):
            loss: torch.Tensor = self.model(**batch).loss
        return loss


def autocast(of: Callable[[], Trial]) -> Trial:
    """Return a trial under autocast."""
    trial = of()
    return Trial(model=Autocast(trial.model), inputs=trial.inputs, other=trial.other)


def _classifier(model: nn.Module, size: int = 32, classes: int = 10) -> Trial:
    """Return the trial of a network that classifies images."""

    def batch() -> tuple[Any, ...]:
        return torch.randn(2, 3, size, size), torch.randint(0, classes, (2,))

    return Trial(
        model=model.train(), loss_fn=functional.cross_entropy, inputs=batch(), other=batch()
    )


def of_timm(name: str, size: int = 64, **options: Any) -> Trial:
    """Return a network of timm."""
    library = import_module("timm")
    return _classifier(library.create_model(name, num_classes=10, **options), size)


def of_torchvision(name: str, size: int = 64, **options: Any) -> Trial:
    """Return a network of torchvision."""
    library = import_module("torchvision.models")
    return _classifier(getattr(library, name)(num_classes=10, **options), size)


def faster_rcnn() -> Trial:
    """Return torchvision's Faster R-CNN, whose boxes are as many as it finds."""
    detection = import_module("torchvision.models.detection")
    model = detection.fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None)

    def batch() -> tuple[Any, ...]:
        target = {"boxes": torch.tensor([[4.0, 4, 30, 30]]), "labels": torch.tensor([1])}
        return [torch.rand(3, 64, 64)], [target]

    class Sum(nn.Module):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.model = model.train()

        def forward(self, images: Any, targets: Any) -> torch.Tensor:
            losses: list[torch.Tensor] = list(self.model(images, targets).values())
            return torch.stack(losses).sum()

    return Trial(model=Sum(), inputs=batch(), other=batch())


def diffusion() -> Trial:
    """Return diffusers' UNet2D, which learns to find the noise in an image."""
    library = import_module("diffusers")
    model = library.UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )

    def loss(found: Any, noise: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(found.sample, noise)

    def batch() -> tuple[Any, ...]:
        noise = torch.randn(2, 3, 16, 16)
        return torch.randn(2, 3, 16, 16) + noise, torch.randint(0, 1000, (2,)), noise

    return Trial(model=model.train(), loss_fn=loss, inputs=batch(), other=batch())


def segmentation(kind: str) -> Trial:
    """Return a network of segmentation-models-pytorch."""
    library = import_module("segmentation_models_pytorch")
    model = getattr(library, kind)("resnet18", encoder_weights=None, classes=1)

    def batch() -> tuple[Any, ...]:
        return torch.randn(2, 3, 64, 64), torch.randint(0, 2, (2, 1, 64, 64)).float()

    loss = library.losses.DiceLoss("binary")
    return Trial(model=model.train(), loss_fn=loss, inputs=batch(), other=batch())


def volumes() -> Trial:
    """Return MONAI's UNet on volumes, with its Dice loss."""
    networks, losses = import_module("monai.networks.nets"), import_module("monai.losses")
    model = networks.UNet(
        spatial_dims=3, in_channels=1, out_channels=2, channels=(4, 8, 16), strides=(2, 2)
    )

    def batch() -> tuple[Any, ...]:
        return torch.randn(2, 1, 16, 16, 16), torch.randint(0, 2, (2, 1, 16, 16, 16)).float()

    loss = losses.DiceLoss(to_onehot_y=True, softmax=True)
    return Trial(model=model.train(), loss_fn=loss, inputs=batch(), other=batch())


def _declare_torchvision() -> list[Any]:
    """Let torchvision be imported where its operators do not load; return what keeps them.

    Its wheels are made for one build of PyTorch, and not for that of every package index. Most of
    its models, and what other libraries use of it, run none of them.
    """
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
    return [library]


_KEPT: Final = [] if "torchvision" in sys.modules else _declare_torchvision()

TRIALS: Final[dict[str, Callable[[], Trial]]] = {
    "transformers BERT": bert,
    "transformers BERT, gradient checkpointing": lambda: _checkpointed(bert()),
    "transformers BERT, autocast to bfloat16": partial(autocast, bert),
    "transformers BERT, LoRA of PEFT": lora,
    "transformers DistilBERT": distilbert,
    "transformers GPT-2": gpt2,
    "transformers GPT-2, gradient checkpointing": lambda: _checkpointed(gpt2()),
    "transformers Llama": llama,
    "transformers Llama, gradient checkpointing": lambda: _checkpointed(llama()),
    "transformers Llama, autocast to bfloat16": partial(autocast, llama),
    "transformers Mixtral": mixtral,
    "transformers Mixtral, experts one by one": partial(mixtral, experts_implementation="eager"),
    "transformers Mixtral, experts batched": partial(
        mixtral, experts_implementation="batched_mm"
    ),
    **{f"transformers {name}": partial(language_model, name) for name in _CAUSAL},
    **{f"transformers {name}": partial(encoder, name) for name in _ENCODERS},
    "transformers BART": bart,
    "transformers T5": t5,
    "transformers T5, gradient checkpointing": lambda: _checkpointed(t5()),
    "transformers Mamba": mamba,
    "transformers Whisper": whisper,
    "transformers Wav2Vec2": wav2vec2,
    "transformers Wav2Vec2, no SpecAugment": partial(wav2vec2, apply_spec_augment=False),
    "transformers Wav2Vec2, no SpecAugment, no layerdrop": partial(
        wav2vec2, apply_spec_augment=False, layerdrop=0.0
    ),
    "transformers HuBERT, no SpecAugment, no layerdrop": partial(
        wav2vec2, "HubertForCTC", apply_spec_augment=False, layerdrop=0.0
    ),
    "transformers ViT": vit,
    "transformers Swin": swin,
    "transformers Segformer": segformer,
    "transformers DETR, a loss of one's own": partial(detector, "DetrForObjectDetection"),
    "transformers DETR, its own loss": partial(matching_detector, "DetrForObjectDetection"),
    "transformers YOLOS, a loss of one's own": partial(detector, "YolosForObjectDetection"),
    "transformers YOLOS, its own loss": partial(matching_detector, "YolosForObjectDetection"),
    "timm ViT": partial(of_timm, "vit_tiny_patch16_224", img_size=64),
    "timm MLP-Mixer": partial(of_timm, "mixer_s32_224", img_size=64),
    "timm EfficientNet": partial(of_timm, "efficientnet_b0"),
    "timm ConvNeXt": partial(of_timm, "convnext_atto"),
    "timm RegNet": partial(of_timm, "regnety_002"),
    "timm PoolFormer": partial(of_timm, "poolformer_s12"),
    "torchvision ResNet-18": partial(of_torchvision, "resnet18"),
    "torchvision DenseNet": partial(of_torchvision, "densenet121"),
    "torchvision ShuffleNet": partial(of_torchvision, "shufflenet_v2_x0_5"),
    "torchvision SqueezeNet": partial(of_torchvision, "squeezenet1_1"),
    "torchvision MobileNetV3": partial(of_torchvision, "mobilenet_v3_small"),
    "torchvision ViT": partial(
        lambda **sizes: of_torchvision("VisionTransformer", **sizes),
        image_size=64, patch_size=16, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=64,
    ),
    "torchvision Faster R-CNN": faster_rcnn,
    "diffusers UNet2D": diffusion,
    "segmentation-models-pytorch U-Net": partial(segmentation, "Unet"),
    "segmentation-models-pytorch FPN": partial(segmentation, "FPN"),
    "segmentation-models-pytorch DeepLabV3+": partial(segmentation, "DeepLabV3Plus"),
    "MONAI UNet": volumes,
}  # fmt: skip
"""What is tried, by library and name."""
