"""What a run reports, and how it is read back: log lines, TensorBoard, wandb, throughput."""
