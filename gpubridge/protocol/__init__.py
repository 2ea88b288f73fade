"""KServe v2 bytes to request objects and back: pure functions, no sockets."""
