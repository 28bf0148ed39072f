"""The short form of the fault harness; `make faults` runs the long one."""

import pytest
from harness import TRIALS, row

pytestmark = pytest.mark.faults


@pytest.mark.parametrize("name", TRIALS)
def test_nothing_is_lost(name):
    found = row(name, seed=1, short=True, only_part=None)
    assert not found["faults"], found
    assert found["tried"] == TRIALS[name].short
