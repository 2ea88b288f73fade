"""Models' own Python environments: archives are unpacked once for each content."""
