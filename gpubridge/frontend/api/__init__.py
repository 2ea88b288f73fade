"""The HTTP port's own pages: a list of links, and one that calls models by the OpenAPI document."""
