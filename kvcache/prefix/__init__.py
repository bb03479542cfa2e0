"""The prefix cache: a radix tree over token ids, its arrays, and the slots that requests hold."""
