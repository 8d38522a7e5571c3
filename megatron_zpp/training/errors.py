"""The error of a user who asked for something that cannot be."""


class SettingsError(ValueError):
    """A flag, or a key of the DeepSpeed file, is wrong. The message is one line that says what to do."""
