"""Optimizer, gradients' norms, learning rate, batch size and loss scale."""
