"""What every test starts from: how Hypothesis searches."""

from __future__ import annotations

import os
import signal
from importlib.util import find_spec

from hypothesis import HealthCheck, settings

# A shell that runs the tests in the background lets them, and what they start, ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Helpers of the tests that need PyTorch; doctests are looked for in every module.
collect_ignore = (
    [] if find_spec("torch") else ["eager_steps.py", "small_networks.py", "traced_models.py"]
)

# Speed is no promise of a test, and machines that run tests are shared: no deadlines.
_QUIET = (HealthCheck.too_slow,)

settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=True,
    suppress_health_check=_QUIET,
)
settings.register_profile("dev", deadline=None, print_blob=True, suppress_health_check=_QUIET)
settings.load_profile("ci" if os.environ.get("CI") else "dev")
