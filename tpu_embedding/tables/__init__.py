"""Creates the stacked tables of a plan, and reads or replaces them by table name.

Public names are in `te.functional`.

* `initial_values`: initial values, equal on any number of devices.
* `table_values`: tables as NumPy arrays, and back.
* `slot_values`: slot variables as NumPy arrays, and back.
* `row_stream`: streams rows to and from hosts, block by block.
* `line_exchange`: cuts tables into blocks, and moves their lines between devices.
"""
