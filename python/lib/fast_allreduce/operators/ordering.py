"""Keeps the order of calls in graphs that the Inductor of torch 2.13 compiles.

Inductor notes for each call with an effect that it follows the previous one. torch 2.13 files the note under the name
of the call's buffer, and its scheduler looks for the name of the operation: the order was lost, and ranks with
different graphs made their calls in different orders. In torch 2.15 both names are the same.
"""

import functools

import torch
from torch._inductor.lowering import lowerings
from torch._inductor.virtualized import V


def _renamed(lower):
    @functools.wraps(lower)
    def lower_in_order(*arguments, **settings):
        before = len(V.graph.operations)
        result = lower(*arguments, **settings)
        notes = getattr(V.graph, "additional_star_deps", {})
        for operation in V.graph.operations[before:]:
            previous = notes.pop(operation.get_name(), None)
            if previous:
                notes[operation.get_operation_name()] |= previous
        return result

    return lower_in_order


def keep_order():
    """Changes how Inductor lowers calls with effects."""
    call = torch.ops.higher_order.with_effects
    lowerings[call] = _renamed(lowerings[call])
