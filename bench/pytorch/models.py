"""Small models of other libraries, with random weights, by name in `TRIALS`.

Models of transformers are rows of ``models.toml``. Libraries are imported when a model is created.
Importing this module declares operators of torchvision if they are missing.
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

ROWS: Final = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A model with its loss and two batches of inputs."""

    model: nn.Module
    loss_fn: Callable[..., torch.Tensor] | None = None
    """Function of output and target; None if the model returns its loss."""
    inputs: tuple[Any, ...]
    other: tuple[Any, ...] = ()
    """Second batch: the same shapes, other values, and another mask if there is one."""


# -- transformers ----------------------------------------------------------------------------------


def _make_text_batch(row: dict[str, Any], lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Return random tokens of a text for each length, their mask, and targets."""
    shape = (len(lengths), max(row.get("length", 16), *lengths))
    tokens = torch.randint(5, row["sizes"]["vocab_size"], shape)
    mask = (torch.arange(shape[1]) < torch.tensor(lengths)[:, None]).long()
    labels = tokens.masked_fill(mask == 0, -100)
    if row["batch"] == "classes":
        labels = torch.randint(0, 2, shape[:1])
    mask_argument = {"attention_mask": mask} if row.get("mask", True) else {}
    return {"input_ids": tokens, **mask_argument, "labels": labels}


def _make_batch(row: dict[str, Any], lengths: tuple[int, ...]) -> dict[str, Any]:
    """Return a batch of keyword arguments with one sample for each length."""
    kind, sizes, count = row["batch"], row["sizes"], len(lengths)
    if kind in ("tokens", "classes"):
        return _make_text_batch(row, lengths)
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


def _read_row(table: str, name: str, further_sizes: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = ROWS[table][name]
    shared = ROWS["small"] if row.get("small") else {}
    return {**row, "sizes": {**shared, **row.get("sizes", {}), **further_sizes}}


def _make_model(row: dict[str, Any]) -> nn.Module:
    model_class = getattr(import_module("transformers"), row["class"])
    return model_class(model_class.config_class(**row["sizes"])).train()


def make_trial(name: str, **sizes: Any) -> Trial:
    """Return a small model of transformers with two batches, whose masks differ."""
    row = _read_row("tried", name, sizes)
    model = _make_model(row)
    inputs, other = (_make_batch(row, lengths) for lengths in ((16, 10), (12, 5)))
    return Trial(model=model, inputs=(inputs,), other=(other,))


def make_checkpointed_trial(name: str) -> Trial:
    """Return a model of transformers with the library's gradient checkpointing."""
    trial = make_trial(name)
    trial.model.gradient_checkpointing_enable()
    return trial


def make_lora_trial(name: str) -> Trial:
    """Return a model of transformers with PEFT's LoRA, which freezes most parameters."""
    peft, trial = import_module("peft"), make_trial(name)
    config = peft.LoraConfig(
        task_type="SEQ_CLS", r=4, lora_dropout=0.1, target_modules=["query", "value"]
    )
    return replace(trial, model=peft.get_peft_model(trial.model, config).train())


class Autocast(nn.Module):  # type: ignore[misc, unused-ignore]
    """A model that returns its loss, computed under autocast to bfloat16."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss."""
        with torch.autocast("cpu", torch.bfloat16):
            loss: torch.Tensor = self.model(**batch).loss
        return loss


def make_autocast_trial(name: str) -> Trial:
    """Return a model of transformers under autocast to bfloat16."""
    trial = make_trial(name)
    return replace(trial, model=Autocast(trial.model))


def make_detector_trial(name: str, *, own_loss: bool) -> Trial:
    """Return a detector with its library's matching loss if `own_loss`, or else a simple one."""
    sizes: dict[str, Any] = {}
    if name == "DETR":
        sizes["backbone"] = None
        sizes["backbone_config"] = import_module("transformers").ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic",
            out_features=["stage2"],
        )  # fmt: skip

    def loss(output: Any, target: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(output.pred_boxes, target) + output.logits.square().mean()

    def make_batch() -> tuple[Any, ...]:
        if not own_loss:
            return torch.randn(2, 3, 32, 32), torch.rand(2, 5, 4)
        labels = [{"class_labels": torch.tensor([1]), "boxes": torch.rand(1, 4)} for _ in range(2)]
        return ({"pixel_values": torch.randn(2, 3, 32, 32), "labels": labels},)

    return _make_two_batch_trial(
        _make_model(_read_row("tried", name, sizes)), None if own_loss else loss, make_batch
    )


# -- other libraries -------------------------------------------------------------------------------


def _make_two_batch_trial(
    model: nn.Module, loss_fn: Any, make_batch: Callable[[], tuple[Any, ...]]
) -> Trial:
    return Trial(model=model.train(), loss_fn=loss_fn, inputs=make_batch(), other=make_batch())


def make_classifier_trial(library: str, name: str, size: int = 64, **options: Any) -> Trial:
    """Return a classifier of images of timm or torchvision."""
    module = import_module("timm" if library == "timm" else "torchvision.models")
    make = partial(module.create_model, name) if library == "timm" else getattr(module, name)
    return _make_two_batch_trial(
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
        """Return the sum of all losses."""
        return torch.stack(list(self.model(images, targets).values())).sum()


def make_faster_rcnn_trial() -> Trial:
    """Return torchvision's Faster R-CNN, whose number of boxes depends on values."""
    make = import_module("torchvision.models.detection").fasterrcnn_mobilenet_v3_large_320_fpn

    def make_batch() -> tuple[Any, ...]:
        target = {"boxes": torch.tensor([[4.0, 4, 30, 30]]), "labels": torch.tensor([1])}
        return [torch.rand(3, 64, 64)], [target]

    return _make_two_batch_trial(
        Losses(make(weights=None, weights_backbone=None)), None, make_batch
    )


class Denoiser(nn.Module):  # type: ignore[misc, unused-ignore]
    """A network of diffusers that returns only the predicted noise."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.unet = network

    def forward(self, noisy: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        """Return the predicted noise in images."""
        noise: torch.Tensor = self.unet(noisy, times).sample
        return noise


def make_unet2d_trial(samples: int, size: int, **sizes: Any) -> Trial:
    """Return diffusers' UNet2D for `samples` square images, with a loss on the predicted noise."""
    network_class = import_module("diffusers").UNet2DModel
    network = network_class(
        sample_size=size, in_channels=3, out_channels=3, norm_num_groups=8, **sizes
    )

    def make_batch() -> tuple[Any, ...]:
        noise = torch.randn(samples, 3, size, size)
        return torch.randn_like(noise), torch.randint(0, 1000, (samples,)), noise

    return _make_two_batch_trial(Denoiser(network), functional.mse_loss, make_batch)


def make_segmentation_trial(kind: str) -> Trial:
    """Return a network of segmentation-models-pytorch by its class name, with the Dice loss."""
    library = import_module("segmentation_models_pytorch")
    return _make_two_batch_trial(
        getattr(library, kind)("resnet18", encoder_weights=None, classes=1),
        library.losses.DiceLoss("binary"),
        lambda: (torch.randn(2, 3, 64, 64), torch.randint(0, 2, (2, 1, 64, 64)).float()),
    )


def make_volume_trial() -> Trial:
    """Return MONAI's UNet on volumes, with its Dice loss."""
    networks, losses = import_module("monai.networks.nets"), import_module("monai.losses")
    return _make_two_batch_trial(
        networks.UNet(
            spatial_dims=3, in_channels=1, out_channels=2, channels=(4, 8, 16), strides=(2, 2)
        ),
        losses.DiceLoss(to_onehot_y=True, softmax=True),
        lambda: (torch.randn(2, 1, 16, 16, 16), torch.randint(0, 2, (2, 1, 16, 16, 16)).float()),
    )


def _declare_torchvision() -> list[Any]:
    """Declare torchvision's operators that are not registered, so that it can be imported.

    Operators are missing if its wheel was built for another build of PyTorch. Most of its models,
    and the functions that other libraries use, call none of these operators. Returns the library
    object, without which PyTorch drops the declarations.
    """
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
    return [library]


_TORCHVISION_LIBRARIES: Final = [] if "torchvision" in sys.modules else _declare_torchvision()


_WITHOUT_LABELS: Final = ("DETR", "YOLOS", "HuBERT")
"""Rows that are tried only as variants."""
_CONSTRUCTORS: Final[dict[str, Callable[..., Trial]]] = {
    "tried": make_trial,
    "checkpointed": make_checkpointed_trial,
    "autocast": make_autocast_trial,
    "lora": make_lora_trial,
    "detector": partial(make_detector_trial, own_loss=False),
    "matching": partial(make_detector_trial, own_loss=True),
}


def _list_transformers() -> dict[str, Make]:
    """Return the constructor of each trial of transformers: rows, each followed by its variants."""
    trials: dict[str, Make] = {}
    for name in ROWS["tried"]:
        if name not in _WITHOUT_LABELS:
            trials[f"transformers {name}"] = partial(make_trial, name)
        for variant, row in ROWS["variants"].items():
            if row["of"] == name:
                make = _CONSTRUCTORS[row.get("make", "tried")]
                trials[f"transformers {variant}"] = partial(make, name, **row.get("sizes", {}))
    return trials


_KINDS: Final = {"U-Net": "Unet", "FPN": "FPN", "DeepLabV3+": "DeepLabV3Plus"}
TRIALS: Final[dict[str, Make]] = {
    **_list_transformers(),
    **{
        f"{library} {name}": partial(
            make_classifier_trial, library, row["name"], **row.get("sizes", {})
        )
        for library in ("timm", "torchvision")
        for name, row in ROWS[library].items()
    },
    "torchvision Faster R-CNN": make_faster_rcnn_trial,
    "diffusers UNet2D": partial(make_unet2d_trial, 2, 16, **ROWS["unet2d"]["tried"]),
    **{
        f"segmentation-models-pytorch {x}": partial(make_segmentation_trial, k)
        for x, k in _KINDS.items()
    },
    "MONAI UNet": make_volume_trial,
}
"""Constructor of each trial, by library and name."""


def _call_once(trial: Trial) -> None:
    """Execute a forward pass in eager mode."""
    trial.model(**trial.inputs[0])


LINES: Final[dict[str, tuple[str, Callable[[Trial], None]]]] = {
    "transformers Segformer": ("model(**batch)", _call_once),
}
"""By trial: the line before `compile` that a refusal states, and a function that executes it."""
