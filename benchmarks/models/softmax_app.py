"""A model in one file, of the row ``one_file``: what ``softmax_arrays`` is in a repository."""

import numpy as np

import gpubridge


@gpubridge.model(
    inputs={"IN": (np.float32, [256])}, outputs={"OUT": (np.float32, [256])}, batching=64
)
def softmax_file(IN):  # noqa: N803  (the name of the input)
    """Return the softmax of each row."""
    powers = np.exp(IN - IN.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)
