"""The one exception type for mistakes that a user can mend."""


class UserError(ValueError):
    """A mistake in what the user asked for: a config, a path, a file, a combination.

    Command lines print its message after ``error:`` and exit with code 2, without a traceback.
    The message says which thing is wrong, where it stands, and what to do about it.
    """
