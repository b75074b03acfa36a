"""The memory of a process is measured as the kernel counts it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from pytorch.process_memory import anonymous_bytes, process_peak  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc"),
]

MEBI = 2**20
LARGE_BYTES = 64 * MEBI
"""More than the C library ever keeps for later."""
SLACK_BYTES = 4 * MEBI
"""What else of a test run may come and go meanwhile."""


def test_memory_that_is_gone_afterwards_counts() -> None:
    """The peak has what was made and freed meanwhile, and not what was there before."""
    kept = torch.ones(LARGE_BYTES, dtype=torch.uint8)

    def work() -> None:
        one = torch.ones(LARGE_BYTES, dtype=torch.uint8)
        for _ in range(20):
            one.add_(1)

    found = process_peak(work)
    for rise in (
        found.anonymous_bytes - found.before_bytes,
        found.total_bytes - found.total_before_bytes,
    ):
        assert abs(rise - LARGE_BYTES) < SLACK_BYTES
    assert found.before_bytes > kept.nbytes
    assert process_peak(lambda: None).anonymous_bytes < found.before_bytes + SLACK_BYTES


def test_pages_of_a_mapped_file_are_not_anonymous(tmp_path: Path) -> None:
    """A tensor in a file counts among all pages only; the bytes of the others are known."""
    path = str(tmp_path / "home")
    mapped = torch.from_file(path, shared=True, size=LARGE_BYTES, dtype=torch.uint8)
    other = torch.ones(1000)
    assert anonymous_bytes([mapped, other, other.view(10, 100), mapped[:5]]) == 4000
    found = process_peak(lambda: mapped.fill_(1))
    assert found.anonymous_bytes - found.before_bytes < SLACK_BYTES
    assert abs(found.total_bytes - found.total_before_bytes - LARGE_BYTES) < SLACK_BYTES


def test_freed_memory_goes_back_at_once() -> None:
    """Many small tensors that are freed leave nothing behind."""
    program = """
from pathlib import Path
import numpy as np
from pytorch.process_memory import give_back_at_once

def anonymous_kib():
    words = Path("/proc/self/status").read_text().split()
    return int(words[words.index("RssAnon:") + 1])

give_back_at_once()
before = anonymous_kib()
for size in (100_000, 1_000_000, 25_000_000):
    kept = [np.ones(size, np.uint8) for _ in range(100_000_000 // size)]
    assert anonymous_kib() - before > 90_000
    del kept
    assert anonymous_kib() - before < 4_000, anonymous_kib() - before
"""
    folder = Path(__file__).parents[2] / "bench"
    subprocess.run([sys.executable, "-c", program], cwd=folder, check=True, timeout=60)
