"""Values and messages that controller and worker share; imports nothing of ours and no MLX."""
