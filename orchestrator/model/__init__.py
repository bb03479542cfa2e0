"""Resolves --model to a directory that mlx-lm can load."""
