"""GGUF files as mlx-lm models."""
