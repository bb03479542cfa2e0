"""Chat templates and tokenizers, and transformers' own rendering."""
