"""Pallas kernels that read, write and update rows on SparseCores.

The plan knows kernels by two files, which need no Pallas. It takes 0.1 s to import, so
the other files are imported where a kernel is built.

* `kernel_access`: the accesses that kernels make to the rows of an array.
* `kernel_limits`: rows that kernels cannot reach, and rules that have no room.
* `row_kernels`: the kernels, as functions of arrays.
* `kernel_bodies`: their bodies, which handle one chunk of ids after another.
* `backend`: runs a body on SparseCores, or in Pallas' interpreter.
* `sections`: numbers the rows of several arrays one array after another.
"""
