"""The OpenAI API's shapes: request fields, answers and errors."""
