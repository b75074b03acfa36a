"""The known bugs apply to the sources of today, so that the nightly run tries every one."""

import pytest

from kit.programs import require_programs
from known_bugs.run import FOLDER, ROOT, apply, patches, suites_of


def test_bugs_are_in_each_package():
    """Each package has a known bug; otherwise its tests are not measured."""
    text = "".join(patch.read_text(encoding="utf-8") for patch in patches())
    packages = [path.parent.name for path in (ROOT / "src/poetmodel").glob("*/__init__.py")]
    assert len(patches()) >= 30
    assert [name for name in packages if f"b/src/poetmodel/{name}/" not in text] == []


@pytest.mark.parametrize("patch", patches(), ids=lambda patch: patch.stem)
def test_patch_applies(patch):
    """A patch that does not apply measures no tests."""
    require_programs("git")
    apply(patch, ROOT, "--check")  # raises where it does not
    assert all((FOLDER.parent / name).exists() for name in suites_of(patch))
