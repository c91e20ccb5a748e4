"""The training loop of `tpu-embedding train`, which scripts can also call.

Begin with `run`, which has the loop, and `run_config`, which has its settings.
`run_steps` has the compiled steps. `reporting` writes files into a run directory, and
`run_directory` reads them.
"""

from tpu_embedding.tools.data.batch import Batch as Batch
from tpu_embedding.tools.data.batch import DataError as DataError
from tpu_embedding.tools.data.batch import Dataset as Dataset
from tpu_embedding.tools.data.batch import DataSource as DataSource
from tpu_embedding.tools.data.batch import SyntheticSource as SyntheticSource
from tpu_embedding.tools.data.batch import padded_batches as padded_batches
from tpu_embedding.tools.data.batch import required_files as required_files
from tpu_embedding.tools.data.block_dataset import BlockDataset as BlockDataset
from tpu_embedding.tools.data.block_dataset import SampleReader as SampleReader
from tpu_embedding.tools.data.criteo import CriteoSource as CriteoSource
from tpu_embedding.tools.data.parquet import ParquetFeature as ParquetFeature
from tpu_embedding.tools.data.parquet import ParquetSource as ParquetSource
from tpu_embedding.tools.data.parquet import RowGroup as RowGroup
from tpu_embedding.tools.data.parquet import row_groups as row_groups
from tpu_embedding.tools.data.synthetic_clicks import (
    SyntheticClicksSource as SyntheticClicksSource,
)
from tpu_embedding.tools.data.synthetic_interactions import (
    InteractionsSource as InteractionsSource,
)
from tpu_embedding.tools.data.synthetic_stream import (
    SyntheticStreamSource as SyntheticStreamSource,
)
from tpu_embedding.tools.data.teacher import ZipfIds as ZipfIds
from tpu_embedding.tools.data.teacher import bias_of_rate as bias_of_rate
from tpu_embedding.tools.data.teacher import (
    random_generator as random_generator,
)
from tpu_embedding.tools.train.models.click import MLP as MLP
from tpu_embedding.tools.train.models.click import ModelConfig as ModelConfig
from tpu_embedding.tools.train.models.click import Outputs as Outputs
from tpu_embedding.tools.train.models.click import click_outputs as click_outputs
from tpu_embedding.tools.train.reporting import (
    TrainingDivergedError as TrainingDivergedError,
)
from tpu_embedding.tools.train.run import RunResult as RunResult
from tpu_embedding.tools.train.run import evaluate as evaluate
from tpu_embedding.tools.train.run import train as train
from tpu_embedding.tools.train.run_config import ConfigError as ConfigError
from tpu_embedding.tools.train.run_config import RunConfig as RunConfig
from tpu_embedding.tools.train.run_config import RunEvent as RunEvent
from tpu_embedding.tools.train.run_config import Target as Target
from tpu_embedding.tools.train.run_config import apply_overrides as apply_overrides
from tpu_embedding.tools.train.run_config import list_configs as list_configs
from tpu_embedding.tools.train.run_config import load_config as load_config
from tpu_embedding.tools.train.run_config import warm_up as warm_up
from tpu_embedding.tools.train.run_directory import (
    RunDirectoryError as RunDirectoryError,
)
