"""The status of the server and its models: a JSON document, and a page that shows it."""
