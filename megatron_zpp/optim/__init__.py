"""What moves the parameters: optimizer, gradients' norms, learning rate, batch size, loss scale."""
