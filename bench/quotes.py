"""Sentences with numbers of the records that hand-written pages must contain, by page.

A name in braces is one of `tables.compute_quoted_numbers`; spaces and line ends count alike.
"""

from __future__ import annotations

from typing import Final

INDEX: Final = "docs/index.md"
METHODS, SOLVING, TRAINING, BOARDS = (
    f"docs/results/{name}.md" for name in ("index", "solving", "training", "boards")
)

QUOTES: Final[tuple[tuple[str, str], ...]] = (
    ("README.md", "on the same {problems} problems"),
    (
        "README.md",
        "the best earlier heuristic of each problem adds {best_extra} of a single pass in the "
        "median",
    ),
    (
        "README.md",
        "[{grid_able_proved} published instances proved to 1 % within a minute, {grid_exact} to "
        "0.01 %]",
    ),
    ("docs/start-research.md", "on {problems} problems"),
    (
        INDEX,
        "We ran every earlier heuristic on {problems} problems and took the best of each: it fails "
        "on {best_unsolved}, and in the median its extra energy is {best_median} times the least "
        "known",
    ),
    (INDEX, "poetmodel solves {optimal_solved}, and proves {proved} solutions optimal"),
    (INDEX, "{grid_proved} feasible problems on the published graphs are proved to 1 %"),
    (INDEX, "within 60 s, in {grid_median} in the median"),
    (
        INDEX,
        "{compiled_within} of {compiled_ran} compiled steps kept their budget, and "
        "{compiled_equal} had exactly eager's results. In {compiled_won} of {compiled_duels}",
    ),
    (
        INDEX,
        "`{board_network}` takes {board_kept} when everything is kept, and trains in "
        "{board_ram} of `{board}` with {board_times} times the instructions",
    ),
    (METHODS, "We ran every method on {problems} problems"),
    (
        METHODS,
        "{best_unsolved} problems stay unsolved, and the others pay {best_median} times the least "
        "overhead in the median and {best_worst} times at worst. poetmodel solves "
        "{optimal_solved} and proves {proved} of them optimal to within 1 %. "
        "On {optimal_ties} problems no better schedule is known.",
    ),
    (METHODS, "On {free} problems the least overhead is 0."),
    (
        METHODS,
        "The least overhead itself is {least} of a single pass in the median; the best earlier "
        "heuristic adds {best_extra}.",
    ),
    (
        METHODS,
        "it pays {greedy_median} times the least overhead in the median, {greedy_worst} times at "
        "worst, and is as good as the best schedule known on {greedy_ties} problems",
    ),
    (
        METHODS,
        "leaves {checkmate_unsolved} problems unsolved, {checkmate_proofs} of them with a proof",
    ),
    (
        SOLVING,
        "{grid_proved} feasible problems were proved to 1 % of the overhead, in {grid_median}",
    ),
    (SOLVING, "On {gurobi_fits} feasible instances every model has at most 2,000 columns and rows"),
    (SOLVING, "On the Cortex-A72 every problem is proved to 1 % within {scale_a72}"),
    (SOLVING, "Importing the package takes {import}, and `poetmodel --help` {help}."),
    (
        TRAINING,
        "Of {compiled_ran} compiled steps of {compiled_networks} networks, {compiled_within} kept "
        "their memory budget and {compiled_equal} had exactly eager's results. In {compiled_won} "
        "of {compiled_duels} comparisons",
    ),
    (
        TRAINING,
        "{library_within} of {library_ran} steps of {library_networks} models kept their budget. "
        "At the peak of a peer they took {library_median} times its processor time in the median, "
        "and {library_best} to {library_worst} in all",
    ),
    (TRAINING, "{fused_median} times the processor time of stock in the median and {fused_worst}"),
    (
        TRAINING,
        "{fused_within} of {fused_ran} steps kept their budget, with peaks within 5 % of the "
        "prediction, and {fused_equal} have stock's bits",
    ),
    (
        BOARDS,
        "`{board_network}` takes {board_kept} when everything is kept, and trains in "
        "{board_ram} of `{board}` with {board_times} times the instructions.",
    ),
    (BOARDS, "equal those of keep-all on a Cortex-M4, bit for bit, in {board_same} programs"),
    (
        BOARDS,
        "{kernel_median} instructions for each multiply-accumulate in the median and "
        "{kernel_worst} at most",
    ),
    (BOARDS, "{kernels} nodes stay below 12"),
    (
        BOARDS,
        "AIfES takes {aifes_instructions} times the instructions of the exported step that "
        "keeps everything, and {aifes_ram} times its RAM.",
    ),
    (BOARDS, "takes {cmsis_least} to {cmsis_most} % of the instructions of CMSIS-NN"),
    ("docs/guides/pytorch-limits.md", "Of {models} models tried, {models_work} train as in eager"),
)
