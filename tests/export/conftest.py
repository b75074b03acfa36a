"""What the tests of exported C share: compiled files."""

import pytest

from kit.shared_objects import STORE


@pytest.fixture(scope="session", autouse=True)
def _compiled_files_of_the_run(tmp_path_factory, request):
    """Let all workers of a run take what one of them has compiled."""
    base = tmp_path_factory.getbasetemp()
    STORE.folder = (base.parent if hasattr(request.config, "workerinput") else base) / "compiled"
