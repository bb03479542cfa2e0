"""From what --model names to a directory that mlx-lm can load."""
