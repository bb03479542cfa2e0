"""Values and messages that controller and worker share. Imports no other folder and no MLX."""
