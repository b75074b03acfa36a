r"""Run the tutorial, ``docs/tutorial.ipynb``, and keep what its cells print.

``--check`` writes nothing and fails where a cell prints something else than the file has. The step
that the tutorial exports was captured from `digits`, with PyTorch, by::

    poetmodel export scripts/make_tutorial.py:digits --optimizer sgd --target step --name digits \
        --out docs/digits.step.json
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
TUTORIAL: Final = ROOT / "docs" / "tutorial.ipynb"
MOST_SECONDS: Final = 120
_COLOUR: Final = re.compile(r"\x1b\[[\d;]*m")


def digits() -> Any:
    """Return a small network for pictures of 12 x 12 pixels, its loss, and a batch."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(8 * 3 * 3, 4)),
    )
    return model, nn.functional.cross_entropy, (torch.randn(4, 1, 12, 12), torch.arange(4))


def executed(path: Path = TUTORIAL) -> dict[str, Any]:
    """Return a notebook with what its cells print when they run now, without colours.

    They run in this process, each line ``!command`` by a shell: no kernel, no terminal, no network.
    """
    nbformat: Any = import_module("nbformat")
    shells: Any = import_module("IPython.core.interactiveshell")
    capturing: Any = import_module("IPython.utils.capture")

    beside = str(Path(sys.executable).parent)  # where the program is
    os.environ["PATH"] = os.pathsep.join([beside, os.environ.get("PATH", "")])
    os.environ["COLUMNS"] = "100"
    config: Any = import_module("traitlets.config").Config({"HistoryManager": {"enabled": False}})
    shell = shells.InteractiveShell(config=config)
    shell.system = _run_command
    for name in ("write_output_prompt", "write_format_data", "finish_displayhook"):
        setattr(shell.displayhook, name, lambda *_: None)  # values are shown as outputs
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    folder = Path.cwd()
    try:
        os.chdir(path.parent)
        for count, cell in enumerate(code, 1):
            with capturing.capture_output(display=False) as captured:
                result = shell.run_cell(cell.source)
            result.raise_error()
            cell.execution_count = count
            cell.outputs = _outputs(nbformat.v4, shell, count, captured, result.result)
    finally:
        os.chdir(folder)
    found: dict[str, Any] = json.loads(nbformat.writes(notebook))
    return found


def _run_command(command: str) -> None:
    """Run a command of a cell, and print what it prints."""
    done = subprocess.run(  # noqa: S602 - the own commands of the notebook
        command,
        shell=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=MOST_SECONDS,
    )
    print(done.stdout, end="")  # noqa: T201
    if done.returncode:
        raise RuntimeError(f"{command}: exit status {done.returncode}")


def _outputs(made: Any, shell: Any, count: int, captured: Any, result: object) -> list[Any]:
    """Return what a cell printed, without colours, and the value that it ends with."""
    found = []
    for name, text in (("stdout", captured.stdout), ("stderr", captured.stderr)):
        lines = _COLOUR.sub("", text).splitlines()
        if lines:
            plain = "".join(f"{line.rstrip()}\n" for line in lines)
            found.append(made.new_output("stream", name=name, text=plain))
    if result is not None:
        data, metadata = shell.display_formatter.format(result)
        found.append(
            made.new_output("execute_result", data=data, metadata=metadata, execution_count=count)
        )
    return found


def text_of(notebook: dict[str, Any]) -> str:
    """Return the text of a notebook file."""
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def differences(stored: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return the cells that print something else, each in words.

    Of pictures only their kind counts. A cell that names programs in ``needs`` counts where these
    are.
    """
    return [
        f"cell {old['id']}: the file has {_cell_outputs(old)}, execution gives {_cell_outputs(new)}"
        for old, new in zip(stored["cells"], found["cells"], strict=True)
        if all(shutil.which(name) for name in new["metadata"].get("needs", ()))
        and _cell_outputs(old) != _cell_outputs(new)
    ]


def _cell_outputs(cell: dict[str, Any]) -> list[object]:
    """Return the outputs of a cell: text, and the kinds of pictures."""
    found: list[object] = []
    for output in cell.get("outputs", ()):
        if "text" in output:
            found.append((output["name"], "".join(output["text"])))
        else:
            found.append(sorted(output["data"]))
    return found


def main() -> int:
    """Write the notebook, or check it; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where stale")
    options = parser.parse_args()
    found = executed()
    if options.check:
        stale = differences(json.loads(TUTORIAL.read_text(encoding="utf-8")), found)
        print("\n".join([*stale, "run scripts/make_tutorial.py"] if stale else []))  # noqa: T201
        return 1 if stale else 0
    TUTORIAL.write_text(text_of(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
