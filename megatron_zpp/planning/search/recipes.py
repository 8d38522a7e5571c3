"""Flags of ZeRO++ and LoCo that go together, for what the planner predicts and ``suggest-settings`` trains.

{P}: data-parallel ranks of a node. {warmup}: steps in which bits warm up.
"""

QUANTIZED = "--zero-quantized-weights --zero-quantized-gradients"
HPZ = "--zero-hpz-partition-size {P}"
LOCO = "--zeropp-loco"
DIFFERENCES = "--zeropp-weight-difference-bits 4"
TWO_BIT_DIFFERENCES = (
    "--zeropp-weight-difference-bits 2 --zeropp-weight-difference-block-size 256 "
    "--zeropp-weight-difference-scaling mean --zeropp-weight-difference-bits-warmup {warmup}:4"
)
TWO_BITS = "--zeropp-gradient-bits 2"
WARMUP = "--zeropp-gradient-bits-warmup {warmup}:4"
ELEMENT_SCALES = "--zeropp-gradient-element-scales"
INT8_STATE = "--zeropp-gradient-sum-dtype int8 --zeropp-secondary-dtype int8"  # costs no loss that shows: E6
