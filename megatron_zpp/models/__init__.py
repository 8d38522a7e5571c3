"""A decoder that flags describe, of plain PyTorch modules that need torch alone, and what every model has in common."""
