"""One rank's share of a model's weights: found, cut, proven, loaded."""
