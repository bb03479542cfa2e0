"""What one owner holds: request and auxiliary slots, batched caches, the prefix cache."""
