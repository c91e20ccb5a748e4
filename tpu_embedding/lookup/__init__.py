"""The traced stages of a lookup, forward and backward. Nothing here runs on the host.

`functional/steps.py` calls these private modules inside `shard_map`, with arguments
that `inputs/` prepared. docs/concepts/lookup.md draws the stages:

    forward     flatten, dedup, send ids, gather, send rows back, combine
    backward    spread, send gradients, merge
"""
