"""Options of all tests: the search of Hypothesis, seeds, and skips that are failures."""

import gc
import logging
import os
import shutil
import signal
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from kit.browser_pages import CHROMIUM
from kit.messages import MessageCatalogue
from kit.programs import SKIP_REASON
from kit.rotation import KEPT, add_kept_tests, read_kept_tests, select_share, select_tests

# A shell that runs the tests in the background lets them, and what they start, ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_NEED_TORCH = {
    path
    for path in Path(__file__).parent.rglob("test_*.py")
    if "\nimport torch\n" in path.read_text(encoding="utf-8")
}
collect_ignore = LEFT_OUT = [] if find_spec("torch") else sorted(map(str, _NEED_TORCH))

# Speed is no promise of a test, and machines that run tests are shared: no deadlines.
_QUIET = (HealthCheck.too_slow,)
EXAMPLES = 100 if os.environ.get("POETMODEL_SEEDS") == "all" else 40
"""Number of examples of a test that states none; more where every seed is tried."""

settings.register_profile(
    "dev",
    max_examples=EXAMPLES,
    deadline=None,
    print_blob=True,
    suppress_health_check=_QUIET,
)
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

# pytest listens to each logger, and PyTorch makes long records of captures where one is heard.
logging.getLogger("torch.__trace").addHandler = lambda _: None

os.fsync = lambda _: None  # no test cuts the power of the disk, which takes longer than its export

os.environ.setdefault("POETMODEL_CACHE", "")
"""No test reads or writes the user's cache; those of caches give folders."""

OWN_KERNELS = (
    tempfile.mkdtemp(prefix="inductor-") if "TORCHINDUCTOR_CACHE_DIR" not in os.environ else None
)
"""The folder for Inductor's kernels of this run, which its processes share; None in these.

Inductor takes a cached kernel also where other vector instructions are chosen than those it was
made for (``ATEN_CPU_CAPABILITY``), and it then computes wrong numbers.
"""
if OWN_KERNELS:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = OWN_KERNELS

NEEDS_TORCH = bool(os.environ.get("POETMODEL_NEEDS_TORCH"))
"""Whether the environment is made to have PyTorch (``tox``)."""

NEEDS_PROGRAMS = bool(os.environ.get("POETMODEL_NEEDS_PROGRAMS"))
"""Whether all programs must be here that tests run: compilers, the emulator (``.ci/run``)."""
SKIPPED = os.environ.get("POETMODEL_SKIPPED")
"""The file for the names of tests that were skipped for lack of a program, one a line."""


def pytest_addoption(parser):
    """Add the option that writes the present messages (`kit.messages`)."""
    parser.addoption("--update-messages", action="store_true", help="write what people are told")


class DoctestFilter:
    """A plugin that imports no module for its doctests if it has none."""

    @pytest.hookimpl(wrapper=True)
    def pytest_collect_file(self, file_path):
        """Omit the collectors of doctests of a module without any."""
        collectors = yield
        if file_path.suffix != ".py" or ">>> " in file_path.read_text(encoding="utf-8"):
            return collectors
        return [each for each in collectors if type(each) is pytest.Module]


def pytest_configure(config):
    """Refuse to pass over all that an environment was made for; settle which seeds are tried."""
    if config.getoption("--update-messages") and getattr(config.option, "numprocesses", None):
        msg = "--update-messages: several processes would write one file; leave -n out"
        raise pytest.UsageError(msg)
    config.pluginmanager.register(DoctestFilter())
    share = select_share()
    os.environ["POETMODEL_SEEDS"] = "all" if share is None else str(share)  # for each worker
    if NEEDS_TORCH and find_spec("torch") is None:
        msg = "POETMODEL_NEEDS_TORCH is set, and PyTorch is not installed"
        raise pytest.UsageError(msg)


def pytest_unconfigure():
    """Remove the kernels of this run."""
    if OWN_KERNELS:
        shutil.rmtree(OWN_KERNELS, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Mark tests of PyTorch; select this run's share of the slow tests that try more seeds."""
    for item in items:
        if item.path in _NEED_TORCH:
            item.add_marker("torch")
    more = [item for item in items if item.get_closest_marker("seeds") is not None]
    taken = select_tests([item.nodeid for item in more], select_share(), read_kept_tests())
    left = {item for item in more if item.nodeid not in taken}
    for item in more:
        item.add_marker("slow")
    if not any("::" in argument for argument in config.args):  # a test that is named runs
        config.hook.pytest_deselected(items=list(left))
        items[:] = [item for item in items if item not in left]


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Spare the collector all that the tests are made of: a capture that fails collects garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_report_header():
    """Print the seeds, so that a run can be repeated, and the tests that are omitted."""
    seeds = f"seeds: POETMODEL_SEEDS={os.environ['POETMODEL_SEEDS']}"
    return [seeds, *(f"without PyTorch: {path} is left out" for path in LEFT_OUT)]


def pytest_terminal_summary(terminalreporter):
    """Keep the tests of more seeds that failed."""
    failed = terminalreporter.stats.get("failed", [])
    for name in add_kept_tests(report.nodeid for report in failed if "seeds" in report.keywords):
        terminalreporter.write_line(f"a seed that failed runs always from now on: {name} ({KEPT})")
    if SKIPPED:
        skipped = terminalreporter.stats.get("skipped", [])
        names = [each.nodeid for each in skipped if SKIP_REASON.search(str(each.longrepr))]
        Path(SKIPPED).write_text("".join(f"{name}\n" for name in names), encoding="utf-8")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Fail skipped tests whose requirements the environment should have."""
    report = yield
    if not report.skipped or hasattr(report, "wasxfail"):
        return report
    marked = item.get_closest_marker("torch") is not None
    fault = ""
    lacking = SKIP_REASON.search(str(report.longrepr)) is not None
    if lacking:
        fault = "skipped where every program must be" if NEEDS_PROGRAMS else ""
    elif NEEDS_TORCH and marked:
        fault = "skipped in the environment that is made for it"
    elif not marked and "could not import 'torch'" in str(report.longrepr):
        fault = "needs PyTorch without the marker torch: no environment would run it"
    if fault:
        report.outcome, report.longrepr = "failed", f"{fault}: {report.longrepr}"
    return report


@pytest.fixture
def told(request, tmp_path_factory):
    """Compare messages with the entry of the test in the catalogue of its module."""
    name = f"{request.path.stem.removeprefix('test_')}.txt"
    return MessageCatalogue(
        path=request.path.parent / "messages" / name,
        name=request.node.name,
        folder=tmp_path_factory.getbasetemp(),
        update=request.config.getoption("--update-messages"),
    )


@pytest.fixture(scope="module")
def browser():
    """Start the browser that the system has."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()
