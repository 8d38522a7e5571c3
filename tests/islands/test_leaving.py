"""What an island that may leave is refused."""

import pytest

from megatron_zpp.islands.elastic.membership import Membership


@pytest.mark.parametrize(
    "values, message",
    [
        ({"island": 3, "num_islands": 3}, "island must be below 3, got 3"),
        ({"island": -1, "num_islands": 3}, "island must be at least 0, got -1"),
        ({"island": 0, "num_islands": 0}, "num_islands must be at least 1, got 0"),
        ({"island": 0, "num_islands": 2, "timeout": 0.0}, "timeout must be above 0, got 0.0"),
        ({"island": 0, "num_islands": 2, "patience": float("nan")}, "patience must be a finite number, got nan"),
    ],
)
def test_a_membership_that_cannot_be(values, message):
    with pytest.raises(ValueError, match=message):
        Membership(lighthouse="localhost:1", secret_file="secret", **values)
