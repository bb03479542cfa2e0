"""One owner's storage: request and auxiliary slots, batched caches, the prefix cache."""
