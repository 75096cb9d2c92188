"""Who may ask a server for what, how often, and from where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphllm.server.http.rate_limit import RateLimit

# What says something of the machine, or stops other people's requests: for keys of its own alone.
ADMIN_PATHS = frozenset(
    {"/server_info", "/tokenizer_info", "/reset_prefix_cache", "/abort_requests", "/start_profile", "/stop_profile"}
)


@dataclass(frozen=True)
class Access:
    """keys: any of them opens; none: everybody may. admin_keys: the same, for `ADMIN_PATHS`, which nobody may without.
    origins: of pages on other hosts that may ask, for CORS; methods, headers: with these; credentials: with cookies and
    keys of the browser's. rate: of each key, or each address. root_path: of this server at the proxy before it. docs:
    /docs is there. quiet: paths whose requests are logged at debug."""

    keys: Sequence[str] = ()
    admin_keys: Sequence[str] = ()
    origins: Sequence[str] = ()
    methods: Sequence[str] = ("*",)
    headers: Sequence[str] = ("*",)
    credentials: bool = False
    rate: RateLimit | None = None
    root_path: str = ""
    docs: bool = True
    quiet: Sequence[str] = ()
