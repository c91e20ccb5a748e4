"""Adam moves every row, or a row once per occurrence of an id, but not both."""

import pytest

from tpu_embedding import optimizers as opt


def test_refuses_to_move_every_row_once_per_occurrence():
    with pytest.raises(
        ValueError, match="every row and once per occurrence.*lazy_adam=False"
    ):
        opt.adam(0.1, lazy_adam=False, use_gradient_accumulation=False)
