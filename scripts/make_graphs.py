"""Make the graph files under ``graphs/`` from the zoo and from the published POET code's models.

``python scripts/make_graphs.py`` writes the files that are missing or differ and removes those
that no model makes; ``--check`` writes nothing and exits 1 where it would.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "bench"))

import published  # noqa: E402
from poetmodel.files import write_text  # noqa: E402
from poetmodel.graph import zoo  # noqa: E402
from poetmodel.graph.catalogue import SUFFIX, model_path  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from poetmodel.graph import Graph

GRAPHS: Final = ROOT / "graphs"
"""The folder of shipped graphs."""


def shipped_graphs() -> Iterator[tuple[str, Graph]]:
    """Yield every shipped model at its default size, by name."""
    for models in (zoo.MODELS, published.MODELS):
        for name, make in models.items():
            yield name, make()


def rendered(graph: Graph) -> str:
    """Return the content of a graph's file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"graph{SUFFIX}"
        graph.save(path)
        return path.read_text(encoding="utf-8")


def differences(folder: Path, due: dict[Path, str]) -> Iterator[tuple[str, Path]]:
    """Yield what stands between a folder and its due content: a verb and a file, each."""
    for path, content in due.items():
        if not path.is_file():
            yield "add", path
        elif path.read_text(encoding="utf-8") != content:
            yield "change", path
    for path in sorted(folder.rglob(f"*{SUFFIX}")):
        if path not in due:
            yield "remove", path


def main(arguments: Sequence[str] | None = None) -> int:
    """Make or check the files; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 on differences")
    parser.add_argument("--folder", type=Path, default=GRAPHS, help="where the files lie")
    options = parser.parse_args(arguments)
    due = {model_path(options.folder, name): rendered(graph) for name, graph in shipped_graphs()}
    found = list(differences(options.folder, due))
    for verb, path in found:
        sys.stdout.write(f"{verb} {path.relative_to(options.folder)}\n")
        if options.check:
            continue
        if verb == "remove":
            path.unlink()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, due[path])
    return 1 if options.check and found else 0


if __name__ == "__main__":
    sys.exit(main())
