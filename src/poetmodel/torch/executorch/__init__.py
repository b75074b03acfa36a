"""ExecuTorch programs: a training step whose order and memory plan meet a RAM budget.

Only `edge` uses ExecuTorch's internal interfaces, which may change with any release.
"""

from __future__ import annotations

from poetmodel.torch.errors import suppress_warnings

with suppress_warnings():
    import executorch.exir
    import executorch.runtime  # noqa: F401 - imported here to suppress their warnings
