"""GPT and Llama: plain PyTorch modules that know nothing of the trainer, each with a plan to cut it over ranks."""
