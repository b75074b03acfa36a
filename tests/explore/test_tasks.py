"""Tasks of the explorer's workers."""

import pytest

from kit.explorers import MLP
from poetmodel.explore.settings import Catalogue, ExplorerSettings
from poetmodel.explore.tasks import Frame, JobContext, find_first_schedule


@pytest.mark.parametrize("limits", [(4335, None), (6736, 1e-9)], ids=["RAM", "deadline"])
def test_first_schedule_is_empty_where_one_limit_excludes_all(limits):
    """The minimum RAM is 4,336 B; with 6,736 B and no deadline everything is kept."""
    context = JobContext(
        catalogue=Catalogue(steps={}), send=lambda _: None, is_cancelled=lambda: False
    )
    settings = ExplorerSettings.model_validate(MLP)
    jobs = (
        {"settings": settings, "ram_bytes": ram_bytes, "deadline_s": deadline_s}
        for ram_bytes, deadline_s in (limits, (6736, None))
    )
    excluded, kept = (find_first_schedule(job, context) for job in jobs)
    assert excluded == Frame()
    assert kept.values["metrics"]["peak_ram_bytes"] == 6736
    assert kept.body
