"""How many collectives between nodes an optimizer step has: on slow links each costs a round trip."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch

from megatron_zpp.zeropp import ZeroPPConfig
from tests.collectives import Recorder
from tests.ranks import run_ranks
from tests.zeropp.training_on_ranks import ALL_FLAGS, Net, shard, step

UNITS = 9  # blocks and the root
MOVES = dataclasses.replace(ALL_FLAGS, weight_moves=True)


def collectives_of_a_step(config: ZeroPPConfig) -> Counter[str]:
    """Those of the third step that have ranks of both nodes."""
    model = Net(num_blocks=UNITS - 1)
    shard(model, config, model.blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        step(model, optimizer, torch.ones(2, 24))
    with Recorder() as recorder:
        step(model, optimizer, torch.ones(2, 24))
    return Counter(each.name for each in recorder.collectives if len({rank // 2 for rank in each.ranks}) > 1)


def test_weights_of_small_units_cross_nodes_in_one_gather():
    found = run_ranks(4, collectives_of_a_step, MOVES)[0]
    print(found)
    assert 0
