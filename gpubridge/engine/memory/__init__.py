"""Memory shared by the server and its stubs: regions and their announcement."""
