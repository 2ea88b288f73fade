"""HTTP/1.1: connections that know messages and memory, and nothing of what they mean."""
