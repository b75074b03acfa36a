"""ExecuTorch programs: a training step whose order and memory plan meet a RAM budget.

Only `edge` uses interfaces of ExecuTorch that it does not promise to preserve.
"""

from __future__ import annotations

from poetmodel.torch.errors import suppress_warnings

with suppress_warnings():
    import executorch.exir
    import executorch.runtime  # noqa: F401 - imported here to silence their warnings
