"""Workers on other machines: their hosts, and mlx.launch."""
