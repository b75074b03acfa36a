r"""Execute the tutorial, ``docs/tutorial.ipynb``, and store the output of its cells.

``--check`` writes nothing and exits 1 if a cell's output differs from the stored one. The step that
the tutorial exports was captured from `digits`, with PyTorch, by::

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
MAX_SECONDS: Final = 120
"""Time limit of each shell command in the tutorial [s]."""
_COLOUR_CODE: Final = re.compile(r"\x1b\[[\d;]*m")


def digits() -> Any:
    """Return a small network for 12 x 12 images, its loss, and a batch of images and labels."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(8 * 3 * 3, 4)),
    )
    return model, nn.functional.cross_entropy, (torch.randn(4, 1, 12, 12), torch.arange(4))


def execute_notebook(path: Path = TUTORIAL) -> dict[str, Any]:
    """Execute a notebook; return its content with the new output of its cells, without colours.

    Cells are executed in this process and in the notebook's folder, lines ``!command`` by a shell.
    There is no kernel, terminal or network connection. Changes ``PATH`` and ``COLUMNS`` of this
    process for good. Raises the exception of a cell that fails.
    """
    nbformat: Any = import_module("nbformat")
    interactiveshell: Any = import_module("IPython.core.interactiveshell")
    capture: Any = import_module("IPython.utils.capture")

    program_folder = str(Path(sys.executable).parent)  # folder of the program ``poetmodel``
    os.environ["PATH"] = os.pathsep.join([program_folder, os.environ.get("PATH", "")])
    os.environ["COLUMNS"] = "100"
    config: Any = import_module("traitlets.config").Config({"HistoryManager": {"enabled": False}})
    shell = interactiveshell.InteractiveShell(config=config)
    shell.system = _run_command
    for name in ("write_output_prompt", "write_format_data", "finish_displayhook"):
        setattr(shell.displayhook, name, lambda *_: None)  # IPython would also print each value
    notebook = nbformat.read(path, as_version=4)
    code_cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    folder = Path.cwd()
    try:
        os.chdir(path.parent)
        for count, cell in enumerate(code_cells, 1):
            with capture.capture_output(display=False) as captured:
                result = shell.run_cell(cell.source)
            result.raise_error()
            cell.execution_count = count
            cell.outputs = _format_outputs(nbformat.v4, shell, count, captured, result.result)
    finally:
        os.chdir(folder)
    content: dict[str, Any] = json.loads(nbformat.writes(notebook))
    return content


def _run_command(command: str) -> None:
    """Execute a shell command and print its output at its end.

    Raises RuntimeError if it fails, and `subprocess.TimeoutExpired` after `MAX_SECONDS`.
    """
    process = subprocess.run(  # noqa: S602 - commands of the notebook itself
        command,
        shell=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=MAX_SECONDS,
    )
    print(process.stdout, end="")  # noqa: T201
    if process.returncode:
        raise RuntimeError(f"{command}: exit status {process.returncode}")


def _format_outputs(
    nbformat_v4: Any, shell: Any, count: int, captured: Any, result: object
) -> list[Any]:
    """Return the outputs of a cell: text without colours, then its last value unless None."""
    outputs = []
    for name, text in (("stdout", captured.stdout), ("stderr", captured.stderr)):
        lines = _COLOUR_CODE.sub("", text).splitlines()
        if lines:
            plain = "".join(f"{line.rstrip()}\n" for line in lines)
            outputs.append(nbformat_v4.new_output("stream", name=name, text=plain))
    if result is not None:
        data, metadata = shell.display_formatter.format(result)
        outputs.append(
            nbformat_v4.new_output(
                "execute_result", data=data, metadata=metadata, execution_count=count
            )
        )
    return outputs


def format_notebook(notebook: dict[str, Any]) -> str:
    """Format a notebook as the text of its file."""
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def describe_differences(stored: dict[str, Any], executed: dict[str, Any]) -> list[str]:
    """Describe each cell whose output differs between two versions of a notebook.

    Of values, such as pictures, only the data types are compared. Cells are skipped if a program
    in their metadata ``needs`` is not installed.
    """
    return [
        f"cell {old['id']}: the file has {_comparable_outputs(old)}, "
        f"execution gives {_comparable_outputs(new)}"
        for old, new in zip(stored["cells"], executed["cells"], strict=True)
        if all(shutil.which(name) for name in new["metadata"].get("needs", ()))
        and _comparable_outputs(old) != _comparable_outputs(new)
    ]


def _comparable_outputs(cell: dict[str, Any]) -> list[object]:
    """Return (stream, text) of each text output of a cell, and the data types of each value."""
    outputs: list[object] = []
    for output in cell.get("outputs", ()):
        if "text" in output:
            outputs.append((output["name"], "".join(output["text"])))
        else:
            outputs.append(sorted(output["data"]))
    return outputs


def main() -> int:
    """Execute the tutorial and write it, or print differences; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where stale")
    options = parser.parse_args()
    notebook = execute_notebook()
    if options.check:
        differences = describe_differences(
            json.loads(TUTORIAL.read_text(encoding="utf-8")), notebook
        )
        print("\n".join([*differences, "run scripts/make_tutorial.py"] if differences else []))  # noqa: T201
        return 1 if differences else 0
    TUTORIAL.write_text(format_notebook(notebook), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
