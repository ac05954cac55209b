"""The one error that a user's input can cause: a single line that says what, where and the remedy."""


class ConfigError(ValueError):
    """A setting, a file or a machine that cannot do what was asked. Raised before any allocation."""
