"""Criteo's click logs as batches: 13 dense inputs, features `cat_00` to `cat_25`.

`criteo_lines.py` reads the files. `synthetic_criteo.py` draws samples of the same shape
without them.
"""

import pathlib
from collections.abc import Sequence

from tpu_embedding.field_checks import raise_all
from tpu_embedding.paths import local_path
from tpu_embedding.tools.data.argument_checks import count_problems
from tpu_embedding.tools.data.block_dataset import BlockDataset, held_out_problems
from tpu_embedding.tools.data.criteo_format import (
    vocabulary_problems,
    vocabulary_sizes_by_name,
)
from tpu_embedding.tools.data.criteo_lines import CriteoLines


class Criteo(BlockDataset):
    """Criteo's click logs: the Kaggle challenge, or days of the 1TB logs.

    Features: int32 `[batch]` row ids `cat_00` to `cat_25`, hashed by
    `row_ids_of_categories`. Dense: float32 `[batch, 13]`, `log(1 + max(x, 0))`; an
    empty field counts as 0.

    Each epoch visits the blocks of `block_size` consecutive lines in a new random
    order. A batch may span two epochs, so every batch is full and every line is used
    once per epoch. Lines are validated when they are read. The files may be larger than
    memory.

    Attributes:
      batch_size: samples per batch.
      vocabulary_sizes: number of rows by feature name.
      num_train_samples: number of training lines.
      num_evaluation_samples: number of held-out lines.
    """

    def __init__(
        self,
        path: str | pathlib.Path | Sequence[str | pathlib.Path],
        *,
        batch_size: int,
        vocabulary_sizes: int | Sequence[int],
        num_evaluation_samples: int | None = None,
        evaluation_path: str | pathlib.Path | None = None,
        seed: int = 0,
        block_size: int | None = None,
    ):
        """Opens the files and indexes their lines, in one pass over each.

        Args:
          path: path of the training file, or paths of several.
          batch_size: samples per batch.
          vocabulary_sizes: rows of each of the 26 features, or one number for all. At
            least 2, because row 0 means an empty field.
          num_evaluation_samples: number of lines held out at the end of the evaluation
            file. Without an evaluation file they are the last lines of the training
            files, which are in time order. None means the whole evaluation file.
          evaluation_path: path of a separate evaluation file, or None.
          seed: seed of the training order, at least 0.
          block_size: lines that stay together when the order is shuffled. None: 64, and
            more for files of over a million such blocks.

        Raises:
          ValueError: if arguments are out of range; the message names all of them.
          DataError: if a file is missing or empty, has too few lines, or is packed by
            gzip. `train_batch` and `evaluation_batches` raise it for a damaged
            line and name file, line and field.
        """
        problems = [
            *count_problems("Criteo", batch_size=batch_size),
            *vocabulary_problems("Criteo", vocabulary_sizes),
            *held_out_problems(
                "Criteo", num_evaluation_samples, evaluation_path is not None
            ),
        ]
        if block_size is not None:
            problems += count_problems("Criteo", block_size=block_size)
        raise_all(problems)
        self.vocabulary_sizes = vocabulary_sizes_by_name(vocabulary_sizes)

        def read(paths: Sequence[str | pathlib.Path]) -> CriteoLines:
            return CriteoLines(
                [local_path(each) for each in paths],
                vocabulary_sizes=list(self.vocabulary_sizes.values()),
                block_size=block_size,
            )

        lines = read([path] if isinstance(path, str | pathlib.Path) else path)
        super().__init__(
            lines,
            batch_size=batch_size,
            num_evaluation_samples=num_evaluation_samples,
            evaluation_reader=read([evaluation_path]) if evaluation_path else None,
            seed=seed,
            num_streams=lines.num_streams(batch_size),
        )
