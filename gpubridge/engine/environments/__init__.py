"""Models' own environments: unpacked once for each content, and told apart from what is none."""
