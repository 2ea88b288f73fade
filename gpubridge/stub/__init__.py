"""The process that runs one model instance: loads ``model.py`` and answers the server's messages."""
