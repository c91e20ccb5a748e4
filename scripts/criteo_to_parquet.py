"""Converts Criteo's click logs from text to Parquet for training.

    python scripts/criteo_to_parquet.py day_0 day_0.parquet

A line of text has 40 tab-separated fields: the label (0 or 1), 13 integers (counts; may
be empty or negative) and 26 categories (8 hex digits; may be empty). The Kaggle
challenge and the 1TB logs share this format. Files whose names end in `.gz` are
decompressed while reading.

The Parquet file has these columns:

* `label`: int8.
* `dense_00` to `dense_12`: float32, `log(1 + max(x, 0))`; an empty field counts as 0.
  MLPerf's DLRM uses the same transform (`data_utils.py` and `dlrm_data_pytorch.py` of
  facebookresearch/dlrm).
* `cat_00` to `cat_25`: int64, 1 plus the category's 32 bits; 0 for an empty field.
  `CriteoSource` takes these ids modulo the table's number of rows.

Rows keep the order of the lines.
"""

import argparse
import pathlib
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from tpu_embedding.argument_checks import about, invalid
from tpu_embedding.paths import local_path
from tpu_embedding.tools.data.batch import DataError
from tpu_embedding.tools.data.criteo import DENSE_NAMES, LABEL
from tpu_embedding.tools.data.parquet import load_pyarrow
from tpu_embedding.tools.data.synthetic_clicks import CATEGORY_NAMES

BLOCK_BYTES: Final = 2**24
"""Bytes of text parsed at a time: about 70,000 lines."""

ROW_GROUP_ROWS: Final = 65_536


def convert(text: str | pathlib.Path, parquet_file: str | pathlib.Path) -> int:
    """Writes the samples of a text file to a Parquet file.

    Needs memory for a few blocks, whatever the size of the file.

    Args:
      text: path of the text, plain or compressed with gzip.
      parquet_file: path of the file to write; an existing file is replaced.

    Returns:
      The number of samples.

    Raises:
      DataError: if the text is missing, a field is wrong, or pyarrow is not installed.
        The message names the column and the lines of the block, and `parquet_file` is
        not written.
    """
    pa, parquet = load_pyarrow("pyarrow"), load_pyarrow("pyarrow.parquet")
    fields = [(LABEL, pa.int8())]
    fields += [(name, pa.float32()) for name in DENSE_NAMES]
    fields += [(name, pa.int64()) for name in CATEGORY_NAMES]
    schema, num_rows = pa.schema(fields), 0
    path = local_path(parquet_file)
    unfinished = path.with_name(f"{path.name}.unfinished")
    with parquet.ParquetWriter(unfinished, schema, write_page_checksum=True) as writer:
        for block in _blocks(local_path(text)):
            place = f"{text}, lines {num_rows + 1} to {num_rows + len(block)}"
            labels = block[LABEL].fill_null(-1).to_numpy(zero_copy_only=False)
            if (wrong := labels[~np.isin(labels, (0, 1))]).size:
                rule, label = "be 0 or 1", int(wrong[0])
                raise invalid(f"{place}: a label", rule, label, kind=DataError)
            arrays = [labels.astype(np.int8)]
            for name in DENSE_NAMES:
                counts = block[name].fill_null(0).to_numpy(zero_copy_only=False)
                arrays.append(np.log1p(np.maximum(counts, 0)).astype(np.float32))
            arrays += [_category(block[name], name, place) for name in CATEGORY_NAMES]
            table = pa.Table.from_arrays(arrays, schema=schema)
            writer.write_table(table, ROW_GROUP_ROWS)
            num_rows += len(block)
    unfinished.replace(path)
    return num_rows


def _blocks(path: pathlib.Path) -> Iterator[Any]:
    """Yields tables of consecutive lines. Empty fields are null."""
    pa, csv = load_pyarrow("pyarrow"), load_pyarrow("pyarrow.csv")
    types: dict[str, Any] = {name: pa.int64() for name in (LABEL, *DENSE_NAMES)}
    types |= dict.fromkeys(CATEGORY_NAMES, pa.string())
    try:
        with csv.open_csv(
            path,
            csv.ReadOptions(
                column_names=list(types), block_size=BLOCK_BYTES, use_threads=False
            ),
            csv.ParseOptions(delimiter="\t", quote_char=False),
            csv.ConvertOptions(
                column_types=types, null_values=[""], strings_can_be_null=True
            ),
        ) as reader:
            yield from reader
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: {error}") from error


def _category(column: Any, name: str, place: str) -> np.ndarray:
    """Returns 1 plus the value of 8 hex digits, or 0 for an empty field."""
    pa = load_pyarrow("pyarrow")
    try:
        words = column.fill_null("0" * 8).cast(pa.binary()).cast(pa.binary(8))
        digits = b"".join(words.to_pylist()).decode()
        numbers = np.frombuffer(bytes.fromhex(digits), ">u4").astype(np.int64)
        return np.where(column.is_valid(), 1 + numbers, 0)
    except (pa.ArrowException, ValueError) as error:
        text = f"{place}, column {name!r}: a category must be 8 hex digits or empty: "
        raise about(DataError(f"{text}{error}."), f"column {name!r}") from error


def main() -> None:
    """Converts the file named on the command line."""
    parser = argparse.ArgumentParser(description="Converts Criteo's text to Parquet.")
    parser.add_argument("text", type=pathlib.Path, help="text of a log, or .gz of it")
    parser.add_argument("parquet", type=pathlib.Path, help="Parquet file to write")
    arguments = parser.parse_args()
    print(f"{convert(arguments.text, arguments.parquet):,} samples written")


if __name__ == "__main__":
    main()
