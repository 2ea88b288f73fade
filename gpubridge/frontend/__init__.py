"""The endpoints of the server: sockets and routes."""
