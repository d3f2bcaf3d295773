"""What goes wrong because of what a user typed, as opposed to what goes wrong in the code."""


class ConfigError(ValueError):
    """A mistake in the configuration or the command line.

    The message is one line that names the value, the limit and the fix. The command line prints it without a stack
    trace and exits with status 2.
    """
