"""A training loop for the embedding layer: run configs, models, metrics, reports.

The command `tpu-embedding train` calls `train` of this package.

* `config`: the value that a file in `configs/` defines. `schedules`: learning rates.
* `run`: the loop. `feeding`: batches, ahead of it. `reporting`: lines, records, plot.
* `step_meter`: waits for steps. `run_directory`: a run's files and their lock.
* `origin`: what a run was started with.
* `mlperf`: the log of a benchmark.
* `steps`: plan, state, train step and evaluation step, which XLA compiles.
* `models/`: the models of the configs. `metrics`: their losses and metrics.
"""

from tpu_embedding.tools.data.batch import Batch as Batch
from tpu_embedding.tools.data.batch import DataError as DataError
from tpu_embedding.tools.data.batch import Dataset as Dataset
from tpu_embedding.tools.data.block_dataset import BlockDataset as BlockDataset
from tpu_embedding.tools.data.block_dataset import SampleReader as SampleReader
from tpu_embedding.tools.data.criteo import CriteoSource as CriteoSource
from tpu_embedding.tools.data.csv_clicks import CsvSource as CsvSource
from tpu_embedding.tools.data.interactions import (
    InteractionsSource as InteractionsSource,
)
from tpu_embedding.tools.data.parquet import ParquetSource as ParquetSource
from tpu_embedding.tools.data.parquet_rows import ParquetFeature as ParquetFeature
from tpu_embedding.tools.data.source import DataSource as DataSource
from tpu_embedding.tools.data.synthetic_clicks import (
    SyntheticClicksSource as SyntheticClicksSource,
)
from tpu_embedding.tools.data.synthetic_stream import (
    SyntheticStreamSource as SyntheticStreamSource,
)
from tpu_embedding.tools.data.yambda.synthetic_yambda import (
    SyntheticYambdaSource as SyntheticYambdaSource,
)
from tpu_embedding.tools.data.yambda.yambda_files import YambdaSource as YambdaSource
from tpu_embedding.tools.train.config import ConfigError as ConfigError
from tpu_embedding.tools.train.config import RunConfig as RunConfig
from tpu_embedding.tools.train.config import Target as Target
from tpu_embedding.tools.train.config import apply_overrides as apply_overrides
from tpu_embedding.tools.train.config import list_configs as list_configs
from tpu_embedding.tools.train.config import load_config as load_config
from tpu_embedding.tools.train.mlperf import MLPerf as MLPerf
from tpu_embedding.tools.train.models.model import MLP as MLP
from tpu_embedding.tools.train.models.model import ModelConfig as ModelConfig
from tpu_embedding.tools.train.models.model import Outputs as Outputs
from tpu_embedding.tools.train.models.model import click_outputs as click_outputs
from tpu_embedding.tools.train.run import RunResult as RunResult
from tpu_embedding.tools.train.run import evaluate as evaluate
from tpu_embedding.tools.train.run import train as train
from tpu_embedding.tools.train.run_directory import (
    RunDirectoryError as RunDirectoryError,
)
from tpu_embedding.tools.train.schedules import warm_up as warm_up
from tpu_embedding.tools.train.step_meter import (
    TrainingDivergedError as TrainingDivergedError,
)
