"""Creates stacked tables, and reads or replaces them by table name.

On devices, rows are dealt and packed, while users, checkpoints and exports want them in
natural order. `row_stream.py` converts between the two, block by block.
"""
