"""Pallas kernels that read, write and update rows on SparseCores.

* `kernel_access`: the accesses that kernels make to the rows of an array.
* `row_kernels`: the kernels, as functions of arrays.
* `kernel_bodies`: their bodies, which handle one chunk of ids after another.
* `backend`: runs a body on SparseCores, or in Pallas' interpreter.
* `sections`: numbers the rows of several arrays one array after another.
"""
