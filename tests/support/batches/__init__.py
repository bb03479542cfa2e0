"""Batches of tiny models, and slow references for KV, sampling and prefixes."""
