"""What goes wrong because of what a user typed, or in the numbers, as opposed to what goes wrong in the code."""


class ConfigError(ValueError):
    """A mistake in the configuration or the command line.

    The message is one line that names the value, the limit and the fix. The command line prints it without a stack
    trace and exits with status 2.
    """


class DivergedError(RuntimeError):
    """A loss or a gradient is not finite: training has ended, and would end so again.

    The first line of the message says what, where and when, the others what to try. The command line prints it without
    a stack trace and exits with status 1; there is no restart.
    """

    def __init__(self, message: str, *, step: int) -> None:
        super().__init__(message)
        self.step = step
        """The optimizer step that was not made."""
