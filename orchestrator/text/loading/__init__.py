"""From a model directory to its text side: tokenizer, end tokens, template."""
