"""Make the graph files under ``graphs/`` from the zoo and from the published POET code's models.

``python scripts/make_graphs.py`` writes the files that are missing or differ and removes those
of models that do not exist; ``--check`` writes nothing and exits 1 if a file would change.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "bench"))

import published  # noqa: E402
from poetmodel.files import write_text  # noqa: E402
from poetmodel.graph import zoo  # noqa: E402
from poetmodel.graph.catalogue import SUFFIX, model_path  # noqa: E402
from poetmodel.graph.io import render_document  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from poetmodel.graph import Graph

GRAPHS: Final = ROOT / "graphs"
"""The folder of shipped graphs."""


def build_shipped_graphs() -> Iterator[tuple[str, Graph]]:
    """Build every shipped model at its default size; yield its name and graph."""
    for models in (zoo.MODELS, published.MODELS):
        for name, build in models.items():
            yield name, build()


def render_graph(graph: Graph) -> str:
    """Return the text of a graph's file, without its writer, which each release would change."""
    return render_document(graph.to_dict())


def main(arguments: Sequence[str] | None = None) -> int:
    """Write and remove files, or only print the changes; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 on differences")
    parser.add_argument("--folder", type=Path, default=GRAPHS, help="folder of the files")
    options = parser.parse_args(arguments)
    contents = {
        model_path(options.folder, name): render_graph(graph)
        for name, graph in build_shipped_graphs()
    }
    status = 0
    for path in sorted({*contents, *options.folder.rglob(f"*{SUFFIX}")}):
        verb = "change" if path.is_file() else "add"
        if path not in contents:
            verb = "remove"
        elif path.is_file() and path.read_text(encoding="utf-8") == contents[path]:
            continue
        sys.stdout.write(f"{verb} {path.relative_to(options.folder)}\n")
        status = int(options.check)
        if not options.check and verb == "remove":
            path.unlink()
        elif not options.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, contents[path])
    return status


if __name__ == "__main__":
    sys.exit(main())
