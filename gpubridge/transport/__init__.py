"""Transport between the server and a stub: messages, descriptors, and leases.

Messages are plain structures. The receiver checks every message against its bounds; nothing is
pickled.
"""
