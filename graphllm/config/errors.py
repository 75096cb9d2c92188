"""The error for everything a user can mend."""

from __future__ import annotations


class ConfigError(ValueError):
    """A setting that cannot be used. The message names the field, the value and the remedy."""


def of_item(mistake: ConfigError, field: str, number: int) -> ConfigError:
    """A mistake in one item of a field that has several, counted from 0."""
    text = str(mistake)
    within = text.removeprefix(field) if text.startswith(f"{field}[") else f": {text}"
    return ConfigError(f"{field}[{number}]{within}")
