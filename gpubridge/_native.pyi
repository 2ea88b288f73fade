"""Types of the compiled module's server half; `gpubridge.dataplane` re-exports them with their contract.

What stubs use of the module is typed in `gpubridge.tensor.native`, since they may run without it.
"""
