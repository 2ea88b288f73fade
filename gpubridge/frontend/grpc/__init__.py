"""The gRPC door: calls on the streams of HTTP/2 connections, and who answers them."""
