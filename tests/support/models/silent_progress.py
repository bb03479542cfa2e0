"""A progress display that shows nothing."""


class SilentProgress:
    """Implements ``Progress``."""

    def update(self, stage: str, done: int, total: int) -> None:
        pass
