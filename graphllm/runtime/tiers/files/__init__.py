"""The disk tier of one rank: blocks of the cache in files, and the threads that write and read them."""
