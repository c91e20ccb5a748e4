"""Pallas kernels that read, write and update rows on SparseCores."""
