"""Creates stacked tables, and reads or replaces them by table name.

Devices hold rows dealt and packed, while users, checkpoints and exports want rows in
natural order. `row_stream.py` converts between the two, block by block.
"""
