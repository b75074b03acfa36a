"""What others publish about training on microcontrollers, each with its source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

NOT_STATED: Final = "not stated there"
"""Where the source that is named has no such figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One piece of work, in its authors' figures."""

    name: str
    url: str
    """The source of all that is said of it."""
    trains: str
    """What is trained, on what."""
    updates: str
    """Which parameters a step updates."""
    precision: str
    ram: str
    work: str
    """Operations or time of a step."""
    limits: str
    """What it does not do."""


OTHERS: Final = (
    Published(
        name="Lin et al., NeurIPS 2022 (tiny-training)",
        url="https://arxiv.org/abs/2206.15472",
        trains="fine-tunes a pre-trained network for visual wake words, on a microcontroller",
        updates="sparse: chosen layers and parts of tensors",
        precision="int8",
        ram="256 KB of SRAM",
        work=NOT_STATED,
        limits="no full backpropagation; gradients of quantized graphs need a scaling of their own",
    ),
    Published(
        name="Cai et al., NeurIPS 2020 (TinyTL)",
        url="https://arxiv.org/abs/2007.11622",
        trains="adapts pre-trained image networks, on edge devices",
        updates="biases and small residual modules; weights are frozen",
        precision=NOT_STATED,
        ram="up to 6.5 times less than training all of the network",
        work=NOT_STATED,
        limits="weights keep their first values",
    ),
    Published(
        name="Nadalini et al., SAMOS 2022 (PULP-TrainLib)",
        url="https://openreview.net/forum?id=-4AlFLBP353",
        trains="layers and a TinyML model, on 8 RISC-V cores",
        updates=NOT_STATED,
        precision="single",
        ram=NOT_STATED,
        work="up to 4.39 MAC a cycle, 36.6 times an STM32L4",
        limits="a library of layers with a search for the quickest tilings and products",
    ),
    Published(
        name="Nadalini et al., 2023",
        url="https://arxiv.org/abs/2305.19167",
        trains="ResNet-8 and DS-CNN end to end, on 8+1 RISC-V cores",
        updates=NOT_STATED,
        precision="half, two at a time (SIMD)",
        ram=NOT_STATED,
        work="17.1 ms (3.11 MAC a cycle) and 6.4 ms (0.81) for a sample",
        limits="needs cores with vectors of half precision",
    ),
    Published(
        name="Deutel et al., 2024 (fully quantized training)",
        url="https://arxiv.org/abs/2407.10734",
        trains="vision and time series, on Cortex-M0+, M4 and M7",
        updates="all, or a part that is chosen at each step",
        precision="quantized throughout",
        ram="34.8 % less than related work",
        work="49.0 % less time a sample than related work; partial updates up to 8.7 times quicker",
        limits="accuracy is traded for memory and time",
    ),
    Published(
        name="Wulfert et al., TPAMI 2024 (AIfES)",
        url="https://github.com/Fraunhofer-IMS/AIfES_for_Arduino",
        trains="dense networks, and small ones with convolution, batch norm and max pooling",
        updates="all, by SGD or Adam",
        precision="single; dense layers also in 32-bit integers",
        ram="slightly more than 100 kB for a convolutional network (abstract of the paper)",
        work=NOT_STATED,
        limits="a library in C, with which networks are put together by hand",
    ),
)
"""The work that the page compares with; figures are of abstracts and read-me files."""
