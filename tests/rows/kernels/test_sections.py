"""Compares `Sections` with a plain enumeration of its rows and ids."""

import itertools

import jax
import jax.numpy as jnp
import pytest

from tpu_embedding.rows.kernels.sections import Sections

CASES = {
    "one": ([8], [1]),
    "several ids": ([4, 2], [1, 3]),
    "same sizes": ([8, 8, 8], [3, 1, 20]),
    "many": ([1, 5, 2, 9], [2, 1, 4, 3]),
}


@pytest.mark.parametrize(("sizes", "ids_per_row"), CASES.values(), ids=CASES)
def test_each_row_is_found(sizes, ids_per_row):
    sections = Sections(sizes, ids_per_row)
    assert sections.num_rows == sum(sizes)
    find = jax.jit(lambda row: sections.find(row))
    contains = jax.jit(
        lambda row: [sections.contains(i, row) for i in range(len(sizes))]
    )
    row = first_id = 0
    for i, (size, num) in enumerate(zip(sizes, ids_per_row, strict=True)):
        start = row
        for _ in range(size):
            found = [int(x) for x in find(jnp.int32(row))]
            assert found == [start, size, first_id, num]
            assert [bool(x) for x in contains(jnp.int32(row))] == [
                j == i for j in range(len(sizes))
            ]
            row += 1
        first_id += size * num


def test_every_id_belongs_to_one_row():
    sections = Sections([4, 2], [1, 3])
    ids = []
    for row in range(sections.num_rows):
        start, size, first_id, num = (int(x) for x in sections.find(jnp.int32(row)))
        ids.append([first_id + row - start + k * size for k in range(num)])
    assert ids == [[0], [1], [2], [3], [4, 6, 8], [5, 7, 9]]
    assert sorted(itertools.chain(*ids)) == list(range(10))
