"""TLS between a socket and the protocol of its connection."""
