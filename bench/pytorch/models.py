"""Small models of other libraries, with random weights.

Models of transformers are rows of ``models.toml``. Libraries are imported when a model is created.
"""

from __future__ import annotations

import sys
import tomllib
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

    Make = Callable[[], "Trial"]

TABLE: Final = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A model with its loss and inputs."""

    model: nn.Module
    loss_fn: Callable[..., torch.Tensor] | None = None
    inputs: tuple[Any, ...]
    other: tuple[Any, ...] = ()
    """Inputs of the same shapes with other values, and another mask if there is one."""


# -- transformers ----------------------------------------------------------------------------------


def _texts(row: dict[str, Any], lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Return random tokens of texts of some lengths, their mask, and targets."""
    shape = (len(lengths), max(row.get("length", 16), *lengths))
    tokens = torch.randint(5, row["sizes"]["vocab_size"], shape)
    mask = (torch.arange(shape[1]) < torch.tensor(lengths)[:, None]).long()
    labels = tokens.masked_fill(mask == 0, -100)
    if row["batch"] == "classes":
        labels = torch.randint(0, 2, shape[:1])
    kept = {"attention_mask": mask} if row.get("mask", True) else {}
    return {"input_ids": tokens, **kept, "labels": labels}


def _batch(row: dict[str, Any], lengths: tuple[int, ...]) -> dict[str, Any]:
    """Return a batch of a model with one sample for each length."""
    kind, sizes, count = row["batch"], row["sizes"], len(lengths)
    if kind in ("tokens", "classes"):
        return _texts(row, lengths)
    if kind == "speech":
        mels, steps = sizes["num_mel_bins"], 2 * sizes["max_source_positions"]
        texts = torch.randint(5, sizes["vocab_size"], (count, sizes["max_target_positions"]))
        return {"input_features": torch.randn(count, mels, steps), "labels": texts}
    if kind == "sound":
        mask = (torch.arange(800) < 50 * torch.tensor(lengths)[:, None]).long()
        labels = torch.randint(1, sizes["vocab_size"], (count, 6))
        return {"input_values": torch.randn(count, 800), "attention_mask": mask, "labels": labels}
    side = sizes.get("image_size", 64)
    pixels = torch.randn(count, 3, side, side)
    shape = (count, side, side) if kind == "masks" else (count,)
    return {"pixel_values": pixels, "labels": torch.randint(0, sizes.get("num_labels", 2), shape)}


def _row(table: str, name: str, more: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = TABLE[table][name]
    shared = TABLE["small"] if row.get("small") else {}
    return {**row, "sizes": {**shared, **row.get("sizes", {}), **more}}


def _model(row: dict[str, Any]) -> nn.Module:
    made = getattr(import_module("transformers"), row["class"])
    return made(made.config_class(**row["sizes"])).train()


def tried(name: str, **more: Any) -> Trial:
    """Return a small model of transformers, with two batches of which the masks differ."""
    row = _row("tried", name, more)
    model = _model(row)
    inputs, other = (_batch(row, lengths) for lengths in ((16, 10), (12, 5)))
    return Trial(model=model, inputs=(inputs,), other=(other,))


def checkpointed(name: str) -> Trial:
    """Return a trial with the library's own gradient checkpointing."""
    trial = tried(name)
    trial.model.gradient_checkpointing_enable()
    return trial


def lora(name: str) -> Trial:
    """Return a trial with PEFT's LoRA: most of its parameters are frozen."""
    library, trial = import_module("peft"), tried(name)
    config = library.LoraConfig(
        task_type="SEQ_CLS", r=4, lora_dropout=0.1, target_modules=["query", "value"]
    )
    return replace(trial, model=library.get_peft_model(trial.model, config).train())


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


def autocast(name: str) -> Trial:
    """Return a trial under autocast."""
    trial = tried(name)
    return replace(trial, model=Autocast(trial.model))


def detector(name: str, *, own_loss: bool) -> Trial:
    """Return a detector with a loss on boxes and classes, or with the library's matching loss."""
    more: dict[str, Any] = {}
    if name == "DETR":
        more["backbone"] = None
        more["backbone_config"] = import_module("transformers").ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic",
            out_features=["stage2"],
        )  # fmt: skip

    def loss(found: Any, target: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(found.pred_boxes, target) + found.logits.square().mean()

    def batch() -> tuple[Any, ...]:
        if not own_loss:
            return torch.randn(2, 3, 32, 32), torch.rand(2, 5, 4)
        labels = [{"class_labels": torch.tensor([1]), "boxes": torch.rand(1, 4)} for _ in range(2)]
        return ({"pixel_values": torch.randn(2, 3, 32, 32), "labels": labels},)

    return _trial_of_two_batches(
        _model(_row("tried", name, more)), None if own_loss else loss, batch
    )


# -- other libraries -------------------------------------------------------------------------------


def _trial_of_two_batches(
    model: nn.Module, loss_fn: Any, batch: Callable[[], tuple[Any, ...]]
) -> Trial:
    return Trial(model=model.train(), loss_fn=loss_fn, inputs=batch(), other=batch())


def classifier(library: str, name: str, size: int = 64, **options: Any) -> Trial:
    """Return a network of timm or torchvision that classifies images."""
    found = import_module("timm" if library == "timm" else "torchvision.models")
    make = partial(found.create_model, name) if library == "timm" else getattr(found, name)
    return _trial_of_two_batches(
        make(num_classes=10, **options),
        functional.cross_entropy,
        lambda: (torch.randn(2, 3, size, size), torch.randint(0, 10, (2,))),
    )


class Losses(nn.Module):  # type: ignore[misc, unused-ignore]
    """A detector of torchvision that returns the sum of its losses."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Any, targets: Any) -> torch.Tensor:
        """Return the sum."""
        return torch.stack(list(self.model(images, targets).values())).sum()


def faster_rcnn() -> Trial:
    """Return torchvision's Faster R-CNN, which finds a varying number of boxes."""
    make = import_module("torchvision.models.detection").fasterrcnn_mobilenet_v3_large_320_fpn

    def batch() -> tuple[Any, ...]:
        target = {"boxes": torch.tensor([[4.0, 4, 30, 30]]), "labels": torch.tensor([1])}
        return [torch.rand(3, 64, 64)], [target]

    return _trial_of_two_batches(Losses(make(weights=None, weights_backbone=None)), None, batch)


class Denoiser(nn.Module):  # type: ignore[misc, unused-ignore]
    """A network of diffusers that returns only the predicted noise."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.unet = network

    def forward(self, noisy: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        """Return the predicted noise in images."""
        found: torch.Tensor = self.unet(noisy, times).sample
        return found


def unet2d(samples: int, size: int, **sizes: Any) -> Trial:
    """Return diffusers' UNet2D, which learns to predict the noise in images."""
    make = import_module("diffusers").UNet2DModel
    network = make(sample_size=size, in_channels=3, out_channels=3, norm_num_groups=8, **sizes)

    def batch() -> tuple[Any, ...]:
        noise = torch.randn(samples, 3, size, size)
        return torch.randn_like(noise), torch.randint(0, 1000, (samples,)), noise

    return _trial_of_two_batches(Denoiser(network), functional.mse_loss, batch)


def segmentation(kind: str) -> Trial:
    """Return a network of segmentation-models-pytorch, with its Dice loss."""
    library = import_module("segmentation_models_pytorch")
    return _trial_of_two_batches(
        getattr(library, kind)("resnet18", encoder_weights=None, classes=1),
        library.losses.DiceLoss("binary"),
        lambda: (torch.randn(2, 3, 64, 64), torch.randint(0, 2, (2, 1, 64, 64)).float()),
    )


def volumes() -> Trial:
    """Return MONAI's UNet on volumes, with its Dice loss."""
    networks, losses = import_module("monai.networks.nets"), import_module("monai.losses")
    return _trial_of_two_batches(
        networks.UNet(
            spatial_dims=3, in_channels=1, out_channels=2, channels=(4, 8, 16), strides=(2, 2)
        ),
        losses.DiceLoss(to_onehot_y=True, softmax=True),
        lambda: (torch.randn(2, 1, 16, 16, 16), torch.randint(0, 2, (2, 1, 16, 16, 16)).float()),
    )


def _declare_torchvision() -> list[Any]:
    """Declare torchvision's operators if they do not load, so that it can be imported.

    Its wheels fit one build of PyTorch, which not every package index has. Most of its models, and
    the functions that other libraries use, call none of these operators. Returns the library object
    that keeps the declarations alive.
    """
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
    return [library]


_KEPT: Final = [] if "torchvision" in sys.modules else _declare_torchvision()


_WITHOUT_LABELS: Final = ("DETR", "YOLOS", "HuBERT")
"""Rows of which only variants are tried."""
_MAKE: Final[dict[str, Callable[..., Trial]]] = {
    "tried": tried,
    "checkpointed": checkpointed,
    "autocast": autocast,
    "lora": lora,
    "detector": partial(detector, own_loss=False),
    "matching": partial(detector, own_loss=True),
}


def _transformers() -> dict[str, Make]:
    """Return the trials of transformers: each row, followed by its variants."""
    found: dict[str, Make] = {}
    for name in TABLE["tried"]:
        if name not in _WITHOUT_LABELS:
            found[f"transformers {name}"] = partial(tried, name)
        for variant, row in TABLE["variants"].items():
            if row["of"] == name:
                make = _MAKE[row.get("make", "tried")]
                found[f"transformers {variant}"] = partial(make, name, **row.get("sizes", {}))
    return found


_KINDS: Final = {"U-Net": "Unet", "FPN": "FPN", "DeepLabV3+": "DeepLabV3Plus"}
TRIALS: Final[dict[str, Make]] = {
    **_transformers(),
    **{
        f"{library} {name}": partial(classifier, library, row["name"], **row.get("sizes", {}))
        for library in ("timm", "torchvision")
        for name, row in TABLE[library].items()
    },
    "torchvision Faster R-CNN": faster_rcnn,
    "diffusers UNet2D": partial(unet2d, 2, 16, **TABLE["unet2d"]["tried"]),
    **{f"segmentation-models-pytorch {x}": partial(segmentation, k) for x, k in _KINDS.items()},
    "MONAI UNet": volumes,
}
"""All trials by library and name."""
