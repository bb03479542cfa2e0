"""Forward passes that all ranks of a group run together."""
