"""The runs of the comparison of training methods: networks, methods and budgets.

This module does not import PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Final

from harness import RecordedRun

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NETWORKS: Final = (
    "resnet18-b1",
    "resnet18-b8",
    "vgg16-b8",
    "mobilenetv2-b8",
    "bert4-b8",
    "gpt4-b8",
    "unet-b8",
)
"""Names of the networks; ``b8`` is a batch of eight."""
SHARES: Final = (0.75, 0.5, 0.35, 0.25)
"""Budgets as fractions of the keep-all peak."""
OURS: Final = {"both": (True, True), "recompute": (False, True), "paging": (True, False)}
"""Compiled steps: (whether they may page, whether they may recompute)."""
KEEP_ALL: Final = "keep-all"
"""The compiled step with a keep-all budget, which measures the cost of compiled execution."""
BUDGETED: Final = (*OURS, "memory-budget")
"""Methods with a budget."""
FILE_HOOKS: Final = "file-hooks"
"""The peer that writes saved tensors to a file."""
PEERS: Final = (FILE_HOOKS, "checkpoint", "selective")
"""Methods without a budget, each with one peak."""
AT_PEERS: Final = (
    ("both", FILE_HOOKS),
    ("paging", FILE_HOOKS),
    ("both", "checkpoint"),
    ("both", "selective"),
    ("both", "memory-budget"),
)
"""Compiled steps, and the peer whose measured heap peak is their budget."""
METHODS: Final = (
    "eager",
    KEEP_ALL,
    *PEERS,
    *BUDGETED,
    *(f"{own}@{peer}" for own, peer in AT_PEERS),
)
"""Names of all methods, in the order in which they run: peers before those that need their peak."""

STOCK: Final = "stock"
"""Inductor as in ``torch.compile``; its share is the ``activation_memory_budget``."""
FUSED: Final = "fused"
"""The back end with Inductor's kernels; its share is a fraction of the peak of `STOCK`."""
FUSED_NETWORKS: Final = ("gpt4-b8", "bert4-b8", "vit4-b8", "unet-b8", "decoder4-b8")
"""Networks of the comparison of Inductor's kernels."""
BACKEND: Final = "backend"
"""The back end with PyTorch's kernels."""
LIBRARY: Final = ("gpt2-small", "bert-base", "vit-base", "convnext-tiny", "unet", "llama")
"""Networks of libraries; ``gpt2-small/4`` has four blocks."""
KNOBS: Final = (0.8, 0.6, 0.4, 0.2, 0.05)
"""Settings of ``activation_memory_budget``; its default is 1."""
FUSED_SHARES: Final = (0.7, 0.55, 0.45)
"""Budgets of the back end as fractions of the peak of `STOCK`."""

LIMIT_S: Final = 30.0
"""Time limit of the solver [s]."""
PAIRS: Final = 9
"""Number of timed steps, each paired with one of the reference."""
SEED: Final = 0
"""Seed of weights and inputs; the next number seeds random operations of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun(RecordedRun):
    """One method on one network with one budget."""

    network: str
    """Name of the network: one of `NETWORKS`, `FUSED_NETWORKS` or `LIBRARY`."""
    method: str
    """One of `METHODS`, `STOCK`, `FUSED`, or a method at a peer's peak, such as ``fused@stock``."""
    share: float | None = None
    """Budget of the method or of its peer; None without one.

    For compiled steps a fraction of the keep-all peak, for `FUSED` of the peak of `STOCK`. For
    `STOCK` and ``memory-budget`` the ``activation_memory_budget``.
    """
    limit_s: float = LIMIT_S
    """Time limit of the solver [s]."""
    pairs: int = PAIRS
    """Number of timed steps, each paired with one of the reference."""
    seed: int = SEED
    """Seed of weights and inputs."""
    slack: float = 0.0
    """Fraction by which a peak may exceed that of a peer and still count as equal.

    The budget of a step at a peer's peak is larger than the peak by this fraction.
    """
    reference: str = "eager"
    """Method with which times and results are compared: ``eager`` or `STOCK`."""
    fresh: bool = False
    """Whether each measured step begins without gradients, so that they are part of the peak."""

    @property
    def name(self) -> str:
        """Name of the run in records."""
        budget = () if self.share is None else (f"{self.share:.0%}",)
        return " | ".join((self.network, self.method, *budget))

    @property
    def kind(self) -> str:
        """Method without the peer."""
        return self.method.partition("@")[0]

    @property
    def compiled_kind(self) -> str | None:
        """Kind of compiled step; None for peers."""
        return self.kind if self.kind in (*OURS, KEEP_ALL, BACKEND, FUSED) else None

    @property
    def peer(self) -> str | None:
        """The peer whose peak is the budget; None for other budgets."""
        return self.method.partition("@")[2] or None


def make_training_runs(
    networks: tuple[str, ...] = NETWORKS,
    methods: tuple[str, ...] = METHODS,
    shares: tuple[float, ...] = SHARES,
    limit_s: float = LIMIT_S,
    pairs: int = PAIRS,
    slack: float = 0.0,
) -> Iterator[TrainingRun]:
    """Yield runs, network by network, peers before the runs at their peak.

    Methods are in the order of `METHODS`, not in that of the argument. Methods with a budget have a
    run for each of `shares`.
    """
    for network, method in product(networks, (known for known in METHODS if known in methods)):
        has_budget = method in BUDGETED or method.partition("@")[2] in BUDGETED
        run = TrainingRun(network=network, method=method, limit_s=limit_s, pairs=pairs, slack=slack)
        yield from (replace(run, share=share) for share in (shares if has_budget else (None,)))


def make_fused_runs(
    networks: tuple[str, ...] = FUSED_NETWORKS, limit_s: float = LIMIT_S, pairs: int = PAIRS
) -> Iterator[TrainingRun]:
    """Yield the runs of the comparison of ``torch.compile`` and the back end, with Inductor."""
    methods: tuple[tuple[str, Sequence[float | None]], ...] = (
        (STOCK, (None, *KNOBS)),
        *((method, (None,)) for method in ("eager", "checkpoint", "selective")),
        (f"{FUSED}@{STOCK}", KNOBS),
        (FUSED, FUSED_SHARES),
    )
    for network, (method, shares) in product(networks, methods):
        run = TrainingRun(
            network=network, method=method, reference=STOCK, limit_s=limit_s, pairs=pairs
        )
        yield from (replace(run, share=share) for share in shares)


def make_library_runs(
    networks: tuple[str, ...] = LIBRARY,
    knobs: tuple[float, ...] = (0.5, 0.2),
    limit_s: float = LIMIT_S,
    pairs: int = PAIRS,
) -> Iterator[TrainingRun]:
    """Yield the runs of `BACKEND` and `FUSED` on networks of libraries, at the peaks of peers."""
    prefix, no_share = f"{BACKEND}@", (None,)
    methods: tuple[tuple[str, str, Sequence[float | None]], ...] = (
        *(("eager", method, no_share) for method in ("eager", "checkpoint", "selective")),
        ("eager", "memory-budget", knobs),
        *(("eager", f"{prefix}{peer}", no_share) for peer in ("checkpoint", "selective")),
        ("eager", f"{prefix}memory-budget", knobs),
        (STOCK, STOCK, (None, *knobs)),
        (STOCK, f"{FUSED}@{STOCK}", knobs),
    )
    eager_methods = [entry for entry in methods if entry[0] != STOCK]
    fused_methods = [entry for entry in methods if entry[0] == STOCK]
    for network, (reference, method, shares) in (
        *product(networks, eager_methods),
        *product(networks, fused_methods),
    ):
        run = TrainingRun(
            network=network,
            method=method,
            reference=reference,
            limit_s=limit_s,
            pairs=pairs,
            fresh=True,
        )
        yield from (replace(run, share=share) for share in shares)
