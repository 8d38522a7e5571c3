"""GPT and Llama: plain PyTorch modules that need torch alone, and what every model has in common."""
