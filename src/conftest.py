"""Make pytest ignore modules whose docstring examples need a library that is not installed."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torch") else ["poetmodel/torch/*"]
collect_ignore = [
    f"poetmodel/torch/{name}.py"
    for name, library in {"huggingface": "transformers", "lightning": "lightning"}.items()
    if not find_spec(library)
]
if not find_spec("executorch"):
    collect_ignore_glob.append("poetmodel/torch/executorch/*")
