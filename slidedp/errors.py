"""The one error that a user's input can cause: a single line that says what, where and the remedy."""

import textwrap


class ConfigError(ValueError):
    """A setting, a file or a machine that cannot do what was asked. Raised before any allocation."""


def reason(error: BaseException) -> str:
    """What an error of a library says, as one line that fits into ours."""
    return textwrap.shorten(str(error) or type(error).__name__, 200, placeholder=" ...").rstrip(".: ")
