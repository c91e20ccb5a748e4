"""Imports tables that other libraries and programs have written.

    opening        open_tables and open_stacked_tables: find the format of a source, and
                   return a TableSource
    source         TableSource: the tables of a file, whose rows are read by ranges
    importing      import_tables: matches the tables of a source with a model's, and
                   writes the rows into the model, by blocks

Formats:

    named_arrays   arrays by name, safetensors, TorchRec's and dynamicemb's files
    tensorflow     checkpoints, read by TensorFlow
    orbax          arrays of checkpoints by their paths
"""
