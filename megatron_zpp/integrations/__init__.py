"""ZeRO++ in training loops of others: one module for each that needs more than ``apply_zeropp`` alone."""
