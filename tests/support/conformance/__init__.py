"""Every architecture, served as in production and compared with mlx-lm's own output."""
