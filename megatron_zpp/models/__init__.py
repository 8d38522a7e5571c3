"""GPT and Llama: plain PyTorch modules, which know nothing of sharding or of the trainer."""
