"""Continued training of networks in int8 and in float: accuracy by storage of small changes.

A network learns half of a data set in float. Then the data change: digits are rotated by 90
degrees, signals of MNIST-1D are flipped in time and sign, and training continues with plain SGD
and a constant rate on new samples. Needs PyTorch, torchao, scikit-learn for its digits,
and mnist1d, which generates signals.
"""

from __future__ import annotations

import copy
import statistics
import time
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import fuse_conv_bn_eval

from harness import PRELOADED, RecordedRun, Study, make_record
from poetmodel import torch as pmt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from poetmodel.sweeps.measurement import Record

KIND: Final = "int8 training"
"""Kind of the records."""
DATA: Final = {"digits": "sklearn", "signals": "mnist1d"}
"""Data sets, and the packages that contain them."""
LENGTHS: Final = (
    (1, 400, (0.003, 0.01, 0.03)),
    (8, 300, (0.03, 0.1, 0.3)),
    (8, 900, (0.03, 0.1)),
)
"""Batch sizes, the number of steps of each, and the learning rates that are tried."""
LONG: Final = 900
"""Steps of long runs on digits, only for options that train all of a network."""
SEEDS: Final = 3
"""Number of networks for each option, with other weights and samples."""
PRETRAINED: Final = 500
"""Steps of pretraining in float, with 32 samples and momentum."""
END: Final = 4
"""Number of layers with weights in a trained end."""


class _Nearest(pmt.QuantizedSGD):
    """Optimizer that rounds int8 weights to nearest: its random numbers are one half."""

    def draws(self, group: int, site: int) -> Any:
        """Return halves for every update and layer."""
        del group, site
        return _Halves()


class _Halves:
    def draw_uniform(self, weight: Tensor, *, first: int = 0) -> Tensor:
        """Return one half for each weight."""
        del first
        return torch.full(weight.shape, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """An option to train a network."""

    make: Callable[[nn.Sequential, Sequence[Tensor]], nn.Module]
    """Creates the network from the folded float network and batches of new data."""
    optimizer: Callable[..., torch.optim.Optimizer] = pmt.QuantizedSGD
    """Creates the optimizer from the network and the learning rate."""


def _int8(
    network: nn.Sequential, batches: Sequence[Tensor], *, rounding: str = "16 bits", train: str
) -> nn.Module:
    return pmt.quantized(network, batches, train=train, rounding=rounding)


def _float_end(network: nn.Sequential, batches: Sequence[Tensor]) -> nn.Module:
    """Return the network with a frozen int8 front and a trained float end."""
    weighted = [k for k, layer in enumerate(network) if hasattr(layer, "weight")]
    cut = weighted[-END]
    return nn.Sequential(pmt.quantized(network[:cut], batches), network[cut:])


def _frozen(network: nn.Sequential, batches: Sequence[Tensor]) -> nn.Module:
    """Return the network with a frozen int8 front and a trained last layer in float."""
    return nn.Sequential(pmt.quantized(network[:-1], batches), network[-1])


WAYS: Final = {
    "all, float": _Way(make=lambda network, _: network),
    "all, int8, 16 bits": _Way(make=partial(_int8, train="all")),
    "all, int8, stochastic": _Way(make=partial(_int8, train="all", rounding="stochastic")),
    "all, int8, nearest": _Way(
        make=partial(_int8, train="all", rounding="stochastic"), optimizer=_Nearest
    ),
    "4 layers, float": _Way(make=_float_end),
    "4 layers, int8, 16 bits": _Way(make=partial(_int8, train=f"last-{END}")),
    "last layer, float": _Way(make=_frozen),
}
"""Trained layers and their number types; all other layers are frozen int8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun(RecordedRun):
    """One training option on one data set."""

    data: str
    """One of `DATA`."""
    batch: int
    """Batch size."""
    way: str
    """One of `WAYS`."""
    steps: int
    rates: tuple[float, ...]
    """Learning rates; the best on the validation samples of the first network is used for all."""
    seeds: int = SEEDS
    pretrained: int = PRETRAINED
    """Steps of pretraining in float."""
    limit_s: float = 3600.0
    """Limit of the whole run [s]."""

    @property
    def name(self) -> str:
        """Name of the run in records."""
        return f"{self.data} | batch {self.batch} | {self.steps} steps | {self.way}"


def runs(data: tuple[str, ...] = tuple(DATA)) -> Iterator[TrainingRun]:
    """Yield each option on some data sets."""
    for name in data:
        for batch, steps, rates in LENGTHS:
            given: dict[str, Any] = {"batch": batch, "steps": steps, "rates": rates}
            for way in WAYS:
                if steps < LONG or (name == "digits" and way.startswith("all")):
                    yield TrainingRun(data=name, way=way, **given)


def smoke_runs() -> Iterator[TrainingRun]:
    """Yield each option with few steps, on the installed data sets."""
    for name, package in DATA.items():
        if find_spec(package) and find_spec("torchao"):
            few: dict[str, Any] = {"steps": 2, "seeds": 1, "rates": (0.1,), "pretrained": 2}
            yield from (TrainingRun(data=name, batch=8, way=way, **few) for way in WAYS)


def measure(fields: dict[str, Any], _start: None = None) -> Record:
    """Execute a run; return its record."""
    wanted = TrainingRun(**{**fields, "rates": tuple(fields["rates"])})
    begun, begun_cpu_s = time.perf_counter(), time.process_time()
    tried = {rate: _train_and_test(wanted, 0, rate) for rate in wanted.rates}
    rate = max(tried, key=lambda each: tried[each][0])
    found = [tried[rate], *(_train_and_test(wanted, seed, rate) for seed in range(1, wanted.seeds))]
    return make_record(
        KIND,
        wanted.name,
        cell=fields,
        workers=1,
        seconds=time.perf_counter() - begun,
        cpu_s=time.process_time() - begun_cpu_s,
        rate=rate,
        validated={str(each): accuracy for each, (accuracy, _) in tried.items()},
        before=[_pretrained_accuracy(wanted, seed) for seed in range(wanted.seeds)],
        accuracy=[accuracy for _, accuracy in found],
        mean=statistics.mean(accuracy for _, accuracy in found),
    )


def _train_and_test(wanted: TrainingRun, seed: int, rate: float) -> tuple[float, float]:
    """Train a network; return its accuracies on validation and test samples."""
    first, parts = _pretrain(wanted.data, seed, wanted.pretrained)
    (x, y), validation, test = parts
    way = WAYS[wanted.way]
    torch.manual_seed(seed)
    model = way.make(copy.deepcopy(first), x[:128].split(32))
    optimizer = way.optimizer(model, rate)
    epochs = -(-wanted.steps * wanted.batch // len(y))
    order = torch.cat([torch.randperm(len(y)) for _ in range(epochs)])
    for k in range(wanted.steps):
        rows = order[k * wanted.batch : (k + 1) * wanted.batch]
        optimizer.zero_grad()
        functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    return _accuracy(model, validation), _accuracy(model, test)


def _pretrained_accuracy(wanted: TrainingRun, seed: int) -> float:
    """Return the pretrained float network's accuracy on the test samples."""
    first, (_, _, test) = _pretrain(wanted.data, seed, wanted.pretrained)
    return _accuracy(first, test)


def _accuracy(model: nn.Module, samples: tuple[Tensor, Tensor]) -> float:
    x, y = samples
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


# -- networks and data -----------------------------------------------------------------------------


@cache
def _pretrain(data: str, seed: int, steps: int) -> tuple[nn.Sequential, list[Any]]:
    """Return a float network trained on the old data, with folded batch norms, and new samples.

    The samples are split for training, validation and test.
    """
    (x, y), *parts = _samples(data, seed)
    torch.manual_seed(seed)
    network = _network((1, 5) if data == "signals" else (3, 3))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    for _ in range(steps):
        rows = torch.randint(len(y), (32,))
        optimizer.zero_grad()
        functional.cross_entropy(network(x[rows]), y[rows]).backward()
        optimizer.step()
    return _fold_batch_norms(network.eval()), parts


def _network(window: tuple[int, int]) -> nn.Sequential:
    """Return a small network of separable convolutions with batch norm, for ten classes."""
    padding = (window[0] // 2, window[1] // 2)
    stride = (1 if window[0] == 1 else 2, 2)
    layers: list[nn.Module] = []

    def convolution(inputs: int, results: int, **options: Any) -> None:
        layers.extend(
            (
                nn.Conv2d(inputs, results, bias=False, **options),
                nn.BatchNorm2d(results),
                nn.ReLU(),
            )
        )

    placed: dict[str, Any] = {"kernel_size": window, "padding": padding}
    convolution(1, 16, **placed, stride=1 if window[0] > 1 else stride)
    for inputs, results, by in ((16, 32, stride), (32, 64, 1)):
        convolution(inputs, inputs, **placed, stride=by, groups=inputs)
        convolution(inputs, results, kernel_size=1)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def _fold_batch_norms(network: nn.Sequential) -> nn.Sequential:
    """Return a network with batch norms folded into its convolutions."""
    layers: list[nn.Module] = []
    for layer in network:
        if isinstance(layer, nn.BatchNorm2d):
            layers[-1] = fuse_conv_bn_eval(layers[-1], layer)
        else:
            layers.append(layer)
    return nn.Sequential(*layers)


def _samples(data: str, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return old samples, and new ones for training, validation and test."""
    x, y = _digits() if data == "digits" else _signals()
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(100 + seed))
    x, y = x[order], y[order]
    half = len(y) // 2
    new = torch.rot90(x[half:], 1, (2, 3)) if data == "digits" else -x[half:].flip(-1)
    cuts = (len(new) // 2, len(new) // 2 + len(new) // 6)
    parts = zip(torch.tensor_split(new, cuts), torch.tensor_split(y[half:], cuts), strict=True)
    return [(x[:half], y[:half]), *parts]


def _digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return torch.from_numpy(x).float().view(-1, 1, 8, 8) / 8 - 1, torch.from_numpy(y)


@cache
def _signals() -> tuple[Tensor, Tensor]:
    from mnist1d.data import get_dataset_args, make_dataset

    arguments = get_dataset_args()
    arguments.num_samples = 4000
    made = make_dataset(arguments)
    x, y = (torch.from_numpy(made[name]) for name in ("x", "y"))
    return x.float().view(len(x), 1, 1, -1) / 2, y.long()


STUDY: Final = Study(
    name="int8-training",
    kind=KIND,
    runs=runs,
    smoke_runs=smoke_runs,
    measure=measure,
    has_own_process=False,
    preloaded=(*PRELOADED, "torch"),
)
