"""Placement of an ensemble's tensors: on their GPU, if all consumers reach it."""

import pytest

from gpubridge.engine.ensemble.execution import DeviceEdges

A, B, C = "GPU-a", "GPU-b", "GPU-c"
REACHED = {(A, B), (B, A)}


class Member:
    def __init__(self, device):
        self.device = device


class Step:
    def __init__(self, index, **outputs):
        self.index = index
        self.outputs = outputs


class Graph:
    def __init__(self, steps):
        self.consumers = {"t": range(1, steps)}


class ExecutionPlan:
    def __init__(self, steps, outputs=()):
        self.graph = Graph(steps)
        self.steps = range(steps)
        self.outputs = outputs


@pytest.mark.parametrize(
    ("made_on", "needed_on", "leaves", "wanted", "stays"),
    [
        (A, [A], False, None, A),
        (A, [A, A], False, None, A),
        (A, [B], False, None, A),
        (A, [A, B], False, None, A),
        (A, [C], False, None, None),
        (A, [A, C], False, None, None),
        (A, [None], False, None, None),
        (A, [A, None], False, None, None),
        (A, [], False, None, None),
        # An instance on each of several GPUs: the one that is on the right one leaves it there.
        (None, [A], False, None, A),
        (None, [A, B], False, None, None),
        # What leaves the ensemble is not copied on its way.
        (A, [], True, A, A),
        (A, [], True, B, B),
        (A, [A], True, A, A),
        (A, [A], True, B, None),
        (A, [A], True, None, None),
    ],
)
def test_placement_of_tensors_on_edges(made_on, needed_on, leaves, wanted, stays):
    members = [Member(device) for device in (made_on, *needed_on)]
    edges = DeviceEdges(members, lambda one, peer: (one, peer) in REACHED)
    plan = ExecutionPlan(len(members), ("t",) if leaves else ())
    assert edges.of_step(Step(0, OUT="t"), plan, wanted).get("OUT") == stays
