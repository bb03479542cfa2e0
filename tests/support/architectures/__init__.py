"""Tiny configurations of mlx-lm's architectures, as data, one file per kind of cache."""
