"""The error for everything a user can mend."""

from __future__ import annotations


class ConfigError(ValueError):
    """A setting that cannot be used. The message names the field, the value and the remedy."""
