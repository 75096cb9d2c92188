"""Conversations: as users give them, as chat templates take them, and the prompts that these make."""
