"""The prefix cache: a radix tree over token ids, its arrays, and what a request holds of both."""
