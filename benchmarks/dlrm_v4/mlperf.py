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

from tpu_embedding.tools import train

LOG_FILE: Final = "mlperf.log"

_LINE_START: Final = ":::MLLOG "
_MAX_LINE: Final = 2**16
"""Longest line that is parsed, in characters; events are much shorter."""

_RUN_STOP: Final = '"key": "run_stop"'


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLPerfLog:
    """Writes `mlperf.log` in the directory of a run, as `RunConfig.on_event`.

    The log takes batch size, learning rates, clipping and seed from the run, and
    numbers of samples from the data. A resumed run removes the events that it repeats.
    A log that ended already stays as it is.

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

    def __call__(self, event: train.RunEvent) -> None:
        """Appends the lines of an event at once, so that a kill does not lose them.

        Raises:
          RunDirectoryError: if the log is a link, or not in UTF-8.
        """
        path = event.directory / LOG_FILE
        if event.kind == "init":
            self._begin(path, event)
            return
        text = _read(path)
        if _RUN_STOP in text:
            return
        samples = {"samples_count": event.step * event.config.batch_size}
        match event.kind:
            case "start" if '"key": "run_start"' not in text:
                _append(path, "init_stop", "run_start", "block_start", **samples)
            case "evaluation_start":
                _append(path, "block_stop", "eval_start", **samples)
            case "evaluation":
                auc = event.values.get("auc")
                _append(path, "eval_accuracy", value=auc, **samples)
                _append(path, "eval_stop", "block_start", **samples)
            case "result":
                status = "success" if event.values["target_met"] else "aborted"
                _append(path, "block_stop", "run_stop", status=status, **samples)

    def _begin(self, path: pathlib.Path, event: train.RunEvent) -> None:
        """Starts a new log, or removes the events that a resumed run repeats."""
        text = _read(path) if event.step else ""
        if _RUN_STOP in text and text.endswith("}\n"):
            return
        repeats_evaluation = event.config.evaluates_after(event.step)
        first_repeated = event.step + (not repeats_evaluation)
        kept = _kept_events(text, first_repeated * event.config.batch_size)
        unfinished = path.with_name(f"{path.name}.partial")
        unfinished.unlink(missing_ok=True)  # It may be a link.
        unfinished.write_text(kept, encoding="utf-8")
        unfinished.replace(path)
        if not kept:
            _append(path, "cache_clear", "init_start", value=True)
            for key, value in self._keys(event).items():
                _append(path, key, value=value)

    def _keys(self, event: train.RunEvent) -> dict[str, Any]:
        """Returns the keys that describe a run.

        The checker takes the batch size before the rates, whose limits depend on it.
        """
        config, data = event.config, event.data
        platform = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
        keys = {
            "submission_benchmark": self.benchmark,
            "submission_division": self.division,
            "submission_org": self.org,
            "submission_platform": platform,
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
            **self.keys,
        }
        if hasattr(data, "anchors"):
            keys["eval_samples"] = data.num_evaluation_samples
            keys["train_samples"] = len(data.anchors) - data.num_evaluation_samples
        if num_samples := keys.get("train_samples"):
            between_evaluations = config.evaluate_every * config.batch_size
            keys["eval_every_data_pct"] = round(between_evaluations / num_samples, 3)
        return keys


def _read(path: pathlib.Path) -> str:
    """Returns the text of a log; empty without a file."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise train.RunDirectoryError(
            f"{path} must be a file, got a link, pipe or device; remove it."
        )
    try:
        return path.read_text(encoding="utf-8") if path.exists() else ""
    except UnicodeDecodeError as error:
        raise train.RunDirectoryError(
            f"{path} must be a log in UTF-8, got {error}; remove it."
        ) from error


def _append(path: pathlib.Path, *keys: str, value: Any = None, **metadata: Any) -> None:
    """Appends events; keys that end with `_start` and `_stop` bound an interval."""
    kinds = {"start": "INTERVAL_START", "stop": "INTERVAL_END"}
    with path.open("a", encoding="utf-8") as file:
        for key in keys:
            event = {
                "namespace": "",
                "time_ms": int(1e3 * time.time()),
                "event_type": kinds.get(key.rpartition("_")[2], "POINT_IN_TIME"),
                "key": key,
                "value": value,
                "metadata": {"file": LOG_FILE, "lineno": 0, **metadata},
            }
            file.write(f"{_LINE_START}{json.dumps(event)}\n")


def _kept_events(text: str, samples: int) -> str:
    """Returns the lines up to the start of the last block that is not repeated.

    Args:
      text: text of a log that has not ended.
      samples: number of samples from which evaluations are repeated.
    """
    lines, end = text.splitlines(keepends=True), 0
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
    return "".join(lines[:end])
