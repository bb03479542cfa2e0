"""What tests share: models and references, and the surroundings of each process, simulated."""
