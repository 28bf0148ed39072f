"""The golden data of the named variants is what timm and torchvision give.

pip install -e '.[dev,peers]' && python -m pytest -m peers
"""

import numpy as np
import peer_variants
import pytest
from conftest import GOLDEN

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.mark.parametrize("name", peer_variants.FILES)
def test_golden_data_is_what_the_peers_give(name):
    made = peer_variants.FILES[name]()
    with np.load(GOLDEN / f"{name}.npz", allow_pickle=False) as saved:
        assert set(saved.files) == set(made)
        for key, value in made.items():
            np.testing.assert_array_equal(saved[key], value, err_msg=key)
