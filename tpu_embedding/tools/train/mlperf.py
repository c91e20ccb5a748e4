"""Writes the log of a run that MLPerf's checker reads, a line per event.

A line is `:::MLLOG` and a JSON object; the package `mlperf-logging` defines the format
and the keys, and checks a log:

    python -m mlperf_logging.compliance_checker --usage training runs/NAME/mlperf.log
"""

import dataclasses
import json
import pathlib
import time
from collections.abc import Mapping
from typing import Any, Final, Literal

import jax

from tpu_embedding import distributed
from tpu_embedding.tools.train.run_directory import RunDirectoryError, replace_text

_LINE_START: Final = ":::MLLOG "
_MAX_LINE: Final = 2**16
"""Longest line that is parsed, in characters; events are much shorter."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLPerf:
    """Names a benchmark of MLPerf Training, whose log a run writes as `mlperf.log`.

    The log takes batch size, learning rates, clipping and seed from the run, and
    numbers of samples from the data.

    Attributes:
      benchmark: name of the benchmark, as `"dlrmv4"`.
      division: `"open"`, or `"closed"`, which fixes most hyperparameters.
      keys: further keys of the log and their values, such as `opt_adam_epsilon`.
      org: organisation that submits the result.
    """

    benchmark: str
    division: Literal["open", "closed"]
    keys: Mapping[str, str | int | float]
    org: str = "unnamed"


class MLPerfLog:
    """Writes the log of one run, on the first process of a job.

    Without a file, or without `RunConfig.mlperf`, it writes nothing.
    """

    def __init__(
        self,
        path: pathlib.Path | None,
        config: Any,
        data: Any,
        *,
        first_step: int = 0,
        evaluates: bool = False,
    ):
        """Starts a new log, with the keys that describe the run, or continues one.

        Args:
          path: the file, or None to write no log.
          config: `RunConfig` of the run.
          data: opened data set, or its outline.
          first_step: steps done. A resumed run removes the events that it repeats, and
            appends to the others. A log that ended already stays as it is.
          evaluates: True if a resumed run evaluates before its next step.

        Raises:
          RunDirectoryError: if the log to continue is not in UTF-8.
        """
        is_on = config.mlperf is not None and distributed.is_first()
        self._path, self._batch_size = path if is_on else None, config.batch_size
        self._continues = False
        if self._path is not None and first_step and self._path.exists():
            first_repeated = first_step + (not evaluates)
            kept, has_ended = _kept_events(
                self._path, first_repeated * self._batch_size
            )
            self._continues = bool(kept)
            if has_ended:
                self._path = None
            elif kept:
                replace_text(self._path, kept)
        if self._path is not None and not self._continues:
            self._path.unlink(missing_ok=True)
            self.write("cache_clear", "init_start", value=True)
            for key, value in _keys(config, data).items():
                self.write(key, value=value)

    def write_start(self, step: int) -> None:
        """Writes the end of the initialisation, unless an earlier start did."""
        if not self._continues:
            self.write("init_stop", "run_start", "block_start", step=step)

    def write(
        self, *keys: str, step: int | None = None, value: Any = None, **metadata: Any
    ) -> None:
        """Appends events at once, so that a kill does not lose them.

        Args:
          *keys: keys of the events; those that end with `_start` and `_stop` are the
            ends of an interval.
          step: steps done, for the number of samples; None for events of no step.
          value: value of the events.
          **metadata: further facts of them.
        """
        if self._path is None:
            return
        if step is not None:
            metadata["samples_count"] = step * self._batch_size
        kinds = {"start": "INTERVAL_START", "stop": "INTERVAL_END"}
        with self._path.open("a", encoding="utf-8") as file:
            for key in keys:
                event = {
                    "namespace": "",
                    "time_ms": int(1e3 * time.time()),
                    "event_type": kinds.get(key.rpartition("_")[2], "POINT_IN_TIME"),
                    "key": key,
                    "value": value,
                    "metadata": {"file": __name__, "lineno": 0, **metadata},
                }
                file.write(f"{_LINE_START}{json.dumps(event)}\n")


def _kept_events(path: pathlib.Path, samples: int) -> tuple[str, bool]:
    """Returns the events up to the last block that is not repeated.

    Args:
      path: the log.
      samples: number of samples from which evaluations are repeated.

    Returns:
      Lines up to the start of a block of steps; and True if the run has ended.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except UnicodeDecodeError as error:
        raise RunDirectoryError(
            f"{path} must be a log in UTF-8, got {error}; remove it."
        ) from error
    if any('"key": "run_stop"' in x and x.endswith("}\n") for x in lines):
        return "".join(lines), True
    end = 0
    for number, line in enumerate(lines, 1):
        try:
            if len(line) > _MAX_LINE:
                break
            event = json.loads(line.removeprefix(_LINE_START))
            key, done = event["key"], event["metadata"].get("samples_count", 0)
            if key == "block_stop" and done >= samples:
                break
        except (LookupError, TypeError, AttributeError, ValueError, RecursionError):
            break  # A kill left half a line.
        if key == "block_start":
            end = number
    return "".join(lines[:end]), False


def _keys(config: Any, data: Any) -> dict[str, Any]:
    """Returns the keys that describe a run.

    The checker takes the batch size before the rates, whose limits depend on it.
    """
    settings: MLPerf = config.mlperf
    keys = {
        "submission_benchmark": settings.benchmark,
        "submission_division": settings.division,
        "submission_org": settings.org,
        "submission_platform": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "config_filename": config.name,
        "seed": config.seed,
        "global_batch_size": config.batch_size,
        "opt_base_learning_rate": config.dense_learning_rate,
        "opt_sparse_base_learning_rate": config.table_learning_rate,
        "opt_gradient_clip_norm": config.max_dense_norm,
        # Models are whole on each device; tables and samples are split.
        "tensor_parallelism": 1,
        "pipeline_parallelism": 1,
        "context_parallelism": 1,
        "expert_parallelism": 1,
        **settings.keys,
    }
    if hasattr(data, "anchors"):
        keys["eval_samples"] = data.num_evaluation_samples
        keys["train_samples"] = len(data.anchors) - data.num_evaluation_samples
    if num_samples := keys.get("train_samples"):
        between_evaluations = config.evaluate_every * config.batch_size
        keys["eval_every_data_pct"] = round(between_evaluations / num_samples, 3)
    return keys
