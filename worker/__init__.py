"""The worker process: start-up, loop, scheduler, engine, sampling."""
