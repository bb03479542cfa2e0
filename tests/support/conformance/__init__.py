"""Every architecture, served as in production and held to mlx-lm's own answers."""
