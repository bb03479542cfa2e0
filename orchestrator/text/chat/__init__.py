"""From the messages of a chat to token ids: templates, control tokens."""
