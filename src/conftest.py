"""Examples in docstrings: those of the PyTorch front end need PyTorch."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torch") else ["poetmodel/torch/*"]
