"""Transport between the server and a stub: messages, descriptors, and leases.

Only plain structures cross. Every message is checked against its bounds by whoever receives it;
nothing is pickled.
"""
