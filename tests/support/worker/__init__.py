"""One worker without a process: its engine, its loop, and a controller to drive it."""
