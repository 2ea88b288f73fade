"""The gRPC endpoint: calls on the streams of HTTP/2 connections, and their handlers."""
