"""Forward passes that all ranks of a group make together."""
