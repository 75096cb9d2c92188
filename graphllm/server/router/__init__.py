"""A router in front of servers for prompts and servers that go on with them."""
