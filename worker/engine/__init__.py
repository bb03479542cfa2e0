"""The MLX engine: prompts in caches of their own, then batched decoding."""
