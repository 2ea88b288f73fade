"""GPUs: the arenas on them, whose memory is where, what crosses between them, and in which order."""
