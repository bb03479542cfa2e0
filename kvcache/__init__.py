"""What an owner holds: request slots, token budget, batched KV caches."""
