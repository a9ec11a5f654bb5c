"""How the failure of an environment that runs in another process is told here."""


class EnvironmentFailed(Exception):
    """An environment in another process did wrong; the text names the exception, with file and line, for the user.

    `kind` is `raised`, `nonsense`, `hung` or `crashed`. `traceback` is the user's own, empty if there is none.
    """

    def __init__(self, kind: str, text: str, *, traceback: str = "") -> None:
        super().__init__(text)
        self.kind = kind
        self.traceback = traceback

    @property
    def details(self) -> str:
        """The traceback on lines of its own, for a log."""
        return f"\n{self.traceback.rstrip()}" if self.traceback else ""
