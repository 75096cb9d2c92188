"""The error for everything a user can mend."""

from __future__ import annotations

import re
from typing import NamedTuple


class ConfigError(ValueError):
    """A setting that cannot be used. The message names the field, the value and the remedy."""


class ErrorPlace(NamedTuple):
    """Where one item of a request stands: its field, and its number there, None where the field has no others."""

    field: str
    number: int | None = None

    def error(self, mistake: ConfigError) -> ConfigError:
        """A mistake in this item."""
        text, place = str(mistake), self.field if self.number is None else f"{self.field}[{self.number}]"
        within = text.removeprefix(self.field) if text.startswith(f"{self.field}[") else f": {text}"
        return ConfigError(f"{place}{within}")

    def prompt_error(self, mistake: ConfigError) -> ConfigError:
        """The same where this item is a prompt, and maybe the mistake is in another field."""
        return self.error(mistake) if re.match(r"prompt\b", str(mistake)) else mistake
