"""Settings of an explored problem."""

import pytest

from poetmodel.explore.settings import Catalogue, ExplorerSettings, problem_fingerprint

FINGERPRINTS = {
    "d4409c0f6acf62f04a79": {"device": "mkr1000"},
    "38d0329488d82e2cf232": {
        "device": "stm32h743",
        "batch": 2,
        "state": "momentum",
        "in_place": True,
        "paging": False,
        "recompute": False,
        "minimize": "ram",
        "deadline_counts": "serial",
        "aux_bytes": 100_000,
        "commit": 3,
    },
    "e6265b05dbfacff213f5": {"device": "rpi4b", "count_parameters": True},
}


@pytest.mark.parametrize("fingerprint", FINGERPRINTS)
def test_answers_of_earlier_stores_are_found_again(fingerprint):
    """The hash of a problem in the store depends on each setting, and on no others."""
    catalogue = Catalogue()
    settings = ExplorerSettings.model_validate({"model": "mlp", **FINGERPRINTS[fingerprint]})
    assert settings == ExplorerSettings.model_validate(settings.to_dict())
    case = catalogue.case(settings)
    problem = case.state_problem(case.load_graph())
    assert problem_fingerprint(problem) == fingerprint
