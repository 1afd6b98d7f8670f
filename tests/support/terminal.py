"""A failing terminal."""

import io


class Screen(io.StringIO):
    """A terminal that accepts some writes, then raises."""

    encoding = "utf-8"

    def __init__(self, error: Exception | None = None, takes: int = 0) -> None:
        super().__init__()
        self.error, self.takes = error, takes

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.takes -= 1
        if self.error is not None and self.takes < 0:
            raise self.error
        return super().write(text)
