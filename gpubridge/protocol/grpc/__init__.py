"""Parsing and encoding of v2's gRPC messages: pure functions, without sockets and the grpc package."""
