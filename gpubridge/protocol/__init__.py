"""Parsing and encoding of KServe v2: pure functions, without sockets."""
