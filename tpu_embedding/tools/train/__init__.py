"""A training loop for the embedding layer: run configs, models, metrics, reports.

The command `tpu-embedding train` calls `train` of this package. `make_train_step` and
`abstract_train_state` let a caller compile a step without running it.

* `config/`: the value that a file in `configs/` defines, and its data section.
* `loop/`: checks a run, and runs it.
* `models/`: the models of the run configs. `metrics`: their losses and metrics.
* `errors`: wrong configs, and errors in the user's code.
"""

from tpu_embedding.tools.data.batch import Batch as Batch
from tpu_embedding.tools.data.batch import DataError as DataError
from tpu_embedding.tools.data.batch import Dataset as Dataset
from tpu_embedding.tools.data.block_dataset import BlockDataset as BlockDataset
from tpu_embedding.tools.data.block_dataset import SampleReader as SampleReader
from tpu_embedding.tools.data.criteo import CriteoSource as CriteoSource
from tpu_embedding.tools.data.interactions import (
    InteractionsSource as InteractionsSource,
)
from tpu_embedding.tools.data.movielens import MovieLensSource as MovieLensSource
from tpu_embedding.tools.data.multi_hot import (
    MultiHotClicksSource as MultiHotClicksSource,
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
from tpu_embedding.tools.jobs.run_lock import RunDirectoryError as RunDirectoryError
from tpu_embedding.tools.jobs.stop_signals import RunStopped as RunStopped
from tpu_embedding.tools.jobs.stop_signals import StopRequest as StopRequest
from tpu_embedding.tools.jobs.stop_signals import stop_on_signals as stop_on_signals
from tpu_embedding.tools.train.config.config_files import list_configs as list_configs
from tpu_embedding.tools.train.config.config_files import load_config as load_config
from tpu_embedding.tools.train.config.overrides import (
    apply_overrides as apply_overrides,
)
from tpu_embedding.tools.train.config.run_config import RunConfig as RunConfig
from tpu_embedding.tools.train.config.run_config import Target as Target
from tpu_embedding.tools.train.config.schedules import warm_up as warm_up
from tpu_embedding.tools.train.errors import ConfigError as ConfigError
from tpu_embedding.tools.train.errors import (
    TrainingDivergedError as TrainingDivergedError,
)
from tpu_embedding.tools.train.loop.ahead_of_time import (
    abstract_batch as abstract_batch,
)
from tpu_embedding.tools.train.loop.profiling import ProfileWindow as ProfileWindow
from tpu_embedding.tools.train.loop.run_plan import make_run_plan as make_run_plan
from tpu_embedding.tools.train.loop.run_summary import RunResult as RunResult
from tpu_embedding.tools.train.loop.step import (
    abstract_train_state as abstract_train_state,
)
from tpu_embedding.tools.train.loop.step import init_train_state as init_train_state
from tpu_embedding.tools.train.loop.step import jit_train_step as jit_train_step
from tpu_embedding.tools.train.loop.step import (
    make_evaluation_step as make_evaluation_step,
)
from tpu_embedding.tools.train.loop.step import make_train_step as make_train_step
from tpu_embedding.tools.train.loop.training_loop import train as train
from tpu_embedding.tools.train.models.model import MLP as MLP
from tpu_embedding.tools.train.models.model import ModelConfig as ModelConfig
from tpu_embedding.tools.train.models.model import Outputs as Outputs
from tpu_embedding.tools.train.models.model import click_outputs as click_outputs
