"""Request bodies: reading, limits, and parsing off the event loop."""
