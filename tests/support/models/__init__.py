"""Tiny models, and mlx-lm's own answers to compare with."""
