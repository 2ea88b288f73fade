"""HTTP/1.1 connections, without knowledge of routes."""
