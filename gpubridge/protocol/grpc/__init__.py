"""The v2 protocol's gRPC messages to request objects and back: pure functions, no sockets, no grpc."""
