"""The response streams of a request, and the responses that they become."""
