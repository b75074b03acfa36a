"""Run a study: ``python -m bench STUDY --out FILE [--resume] [--smoke]``; --help has the rest."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from studies import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
