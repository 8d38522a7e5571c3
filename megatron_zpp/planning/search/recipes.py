"""Flags of ZeRO++ and LoCo that go together, for what the planner predicts and ``suggest-settings`` trains.

{P}: data-parallel ranks of a node. {warmup}: steps in which bits warm up.
"""

QUANTIZED = "--zero-quantized-weights --zero-quantized-gradients"
HPZ = "--zero-hpz-partition-size {P}"
LOCO = "--zeropp-loco"
DIFFERENCES = "--zero-weight-difference-bits 4"
TWO_BIT_DIFFERENCES = (
    "--zero-weight-difference-bits 2 --zero-weight-difference-block-size 256 --zero-weight-difference-scaling mean "
    "--zero-weight-difference-bits-warmup {warmup}:4"
)
TWO_BITS = "--zero-gradient-bits 2"
WARMUP = "--zero-gradient-bits-warmup {warmup}:4"
ELEMENT_SCALES = "--zero-gradient-element-scales"
INT8_STATE = "--zero-gradient-sum-dtype int8 --hpz-secondary-dtype int8"  # costs no loss that shows: E6
