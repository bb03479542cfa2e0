"""Tiny models, and mlx-lm's own output to compare with."""
