"""Tiny configurations of mlx-lm's architectures, as data, one file a kind of cache."""
