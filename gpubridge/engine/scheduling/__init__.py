"""Schedulers: choose the next batch and its instance; pure rules, without clock or socket.

`sequence_strategies` makes a model's `Scheduler`. Its items are requests, or a `SequenceItem` for each
request. The default queue and the dynamic batcher are compiled (`gpubridge.dataplane.DynamicBatcher`).
"""
