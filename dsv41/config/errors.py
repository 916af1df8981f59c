"""The one exception type for input that a user can mend."""


class DSV41Error(ValueError):
    """Bad input: a config, checkpoint, flag or request that cannot be used.

    The message names the file, tensor, field, flag or request at fault and what was expected. Launch scripts print it
    as one line on stderr and exit with status 2.
    """


class ConfigError(DSV41Error):
    """A config whose values cannot describe a model; the message starts with the field's name."""
