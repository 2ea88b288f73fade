"""What the server says of itself: log lines and counters."""
