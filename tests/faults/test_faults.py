"""The short form of the fault harness; `make faults` runs the long one."""

import pytest
from harness import TRIALS, chosen, row

pytestmark = pytest.mark.faults


@pytest.mark.parametrize("name", chosen(short=True))
def test_nothing_is_lost(name):
    cells = row(name, seed=1, short=True, only_part=None)
    assert not cells["faults"], cells
    assert cells["tried"] == TRIALS[name].short
