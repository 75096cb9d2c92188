"""Regular expressions for structured output: what is refused of users', and those that stand for formats."""

from __future__ import annotations

import re

from graphllm.config import ConfigError

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]+)?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
# The library's own lets 30 February's neighbour through in every year. No leap seconds: few parsers take them.
FORMAT_PATTERNS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
_BRACED = re.compile(r"\\(?:[pPuUx](\{[^{}]*\})|.)", re.DOTALL)  # an escape; some name a character in braces
FORMATS = frozenset(["duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"])


def check_regex(pattern: object, where: str) -> str:
    """The pattern, unless the grammar library would read it differently from JSON Schema's and Python's dialect.

    What it cannot compile at all (look-around, back-references) it says itself.
    """
    if not isinstance(pattern, str):
        raise ConfigError(f"{where}: {pattern!r:.80} is no regular expression; give a string")
    for flags in re.findall(r"\(\?[a-zA-Z-]*[:)]", pattern):
        if any(flag in flags for flag in "RUu"):
            raise ConfigError(f"{where}: the flags {flags:.80} in {pattern!r:.80} are not supported; leave them out")
    in_class, escaped, previous = False, False, ""
    braced = {at for found in _BRACED.finditer(pattern) for at in range(*found.span(1))}
    for at, c in enumerate(pattern):
        pair = pattern[at : at + 2]
        if escaped or at in braced:
            escaped, previous = False, ""
            continue
        if c == "\\":
            escaped = True
            continue
        if in_class and (c == "[" or pair in ("&&", "--", "~~")):
            raise ConfigError(
                f"{where}: {pair!r} inside [...] in {pattern!r:.80} is ambiguous; write it with a backslash"
            )
        if not in_class and c == "+" and previous and previous in "*+?}":
            raise ConfigError(f"{where}: possessive quantifier in {pattern!r:.80}; leave out its '+'")
        if not in_class and c == "[":
            in_class = True
        elif in_class and c == "]" and previous not in ("[", "[^"):
            in_class = False
        previous = "[^" if in_class and c == "^" and previous == "[" else c
    if escaped:
        raise ConfigError(f"{where}: {pattern!r:.80} ends in a backslash; double it")
    return pattern


def ascii_classes(pattern: str) -> str:
    r"""\d and \w as ASCII, as in JSON Schema's dialect; all Unicode digits and letters would be a surprise.

    Where they are excluded ([^\d], \D) they stay Unicode's: what is matched is right by either reading.
    """
    parts = re.split(r"(\\.|\[\^?\]?|\])", pattern, flags=re.DOTALL)
    opened = ""
    for i, part in enumerate(parts):
        if part in (r"\d", r"\w") and not opened.startswith("[^"):
            chars = "0-9" if part == r"\d" else "0-9A-Za-z_"
            parts[i] = chars if opened else f"[{chars}]"
        elif part.startswith("[") and not opened:
            opened = part
        elif part == "]":
            opened = ""
    return "".join(parts)
