"""Which requests make the next batch, and of which instance: pure rules, without clock or socket.

`sequence_strategies` gives a model its `Scheduler`; what it holds are requests, or a `SequenceItem` for
each. The default queue and the dynamic batcher are compiled
(`gpubridge.dataplane.DynamicBatcher`).
"""
