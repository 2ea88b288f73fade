"""Host memory of a stub: inputs, outputs, states and client regions."""
