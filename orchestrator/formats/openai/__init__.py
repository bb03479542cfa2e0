"""OpenAI's API: request fields, responses and errors."""
