"""Imports tables that other libraries and programs wrote.

`opening` finds a file's format. Each format's reader (`named_arrays`, `tensorflow`,
`orbax`) makes a `TableSource`, and `importing` writes its rows into a model.
"""
