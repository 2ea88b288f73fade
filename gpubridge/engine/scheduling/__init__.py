"""Choice of the next batch and its instance: pure rules, without clock or socket.

`sequence_strategies` gives a model its `Scheduler`; what it holds are requests, or a `SequenceItem` for
each. The default queue and the dynamic batcher are compiled
(`gpubridge.dataplane.DynamicBatcher`).
"""
