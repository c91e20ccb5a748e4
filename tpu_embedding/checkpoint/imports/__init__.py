"""Imports tables written by other libraries and programs.

    opening        open_tables and open_stacked_tables find a source's format
    source         TableSource: a file's tables, whose rows are read by range
    importing      import_tables writes a source's rows into a model block by block

Formats:

    named_arrays   dicts of arrays, safetensors, and TorchRec's state dicts
    tensorflow     TensorFlow checkpoints
    orbax          arrays of Orbax checkpoints, by path
"""
