"""The paths of a server that need an admin key."""

# They say something of the machine, or stop other people's requests.
ADMIN_PATHS = frozenset(
    {
        "/server_info",
        "/tokenizer_info",
        "/reset_prefix_cache",
        "/abort_requests",
        "/start_profile",
        "/stop_profile",
        "/sleep",
        "/wake_up",
        "/is_sleeping",
        "/release_kv_cache_memory",
    }
)
