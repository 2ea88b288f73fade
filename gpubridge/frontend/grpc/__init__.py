"""The gRPC endpoint: HTTP/2 connections, calls on their streams, and the methods."""
