"""Reports a run: lines on the screen, records in files, and a plot of two curves.

Lines contain no control characters, so they read the same in a terminal and in a file.

Records are JSON, one per line. The first is `{"run": ...}`, the next are `{"step": ...,
"loss": ...}`, `{"step": ..., "evaluation": ...}` or `{"step": ..., "saved": true}`, and
the last is `{"result": ...}`. A resumed run appends another `{"run": ...}` and
continues.
"""

import contextlib
import json
import pathlib
from collections.abc import Iterator
from typing import Any, Final

from tpu_embedding.distributed.output import print_line
from tpu_embedding.tools.plotting import make_figure
from tpu_embedding.tools.train.loop.tensorboard import TENSORBOARD_DIR, ScalarWriter

RECORDS_FILE: Final = "metrics.jsonl"
PLOT_FILE: Final = "curves.png"

Record = dict[str, Any]


class RunReport:
    """Writes the lines, records and plot of one run.

    Attributes:
      directory: directory of the records and the plot.
    """

    def __init__(self, directory: pathlib.Path):
        """Creates the directory if needed, and opens the records file for appending."""
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / RECORDS_FILE
        # A killed run may have left an incomplete last line. The next record must start
        # on a line of its own.
        is_incomplete = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
        self._scalars: ScalarWriter | None = None
        self._file = path.open("a", encoding="utf-8")
        if is_incomplete:
            self._file.write("\n")

    def start_tensorboard(self, first_step: int) -> None:
        """Writes later records as TensorBoard scalars, too.

        Args:
          first_step: steps done before.
        """
        self._scalars = ScalarWriter(self.directory / TENSORBOARD_DIR, first_step)

    def line(self, text: str) -> None:
        """Prints a line at once; a lost terminal does not end the run."""
        print_line(text)

    def record(self, record: Record) -> None:
        """Writes a record at once, so that a kill does not lose it."""
        with self._naming_file():
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()

    def progress(self, record: Record, num_steps: int) -> None:
        """Writes a record of progress, and prints it as a line.

        Args:
          record: record of `StepMeter`.
          num_steps: total steps of the run.
        """
        self.record(record)
        self._write_scalars(record["step"], "train", record)
        parts = [
            f"step {record['step']:>{len(str(num_steps))}}/{num_steps}",
            "no loss" if record["loss"] is None else f"loss {record['loss']:.5f}",
        ]
        if record["steps_per_second"] is not None:
            parts.append(f"{record['steps_per_second']:.1f} steps/s")
            parts.append(f"{record['samples_per_second']:,.0f} samples/s")
            parts.append(f"input wait {record['input_wait']:.0%}")
        parts.append(f"rounds {record['rounds']}")
        if record["skipped"]:
            parts.append(f"skipped {record['skipped']}")
        if record["out_of_range"]:
            parts.append(f"ids out of range {record['out_of_range']:,}")
        for name, counts in record.get("dynamic_tables", {}).items():
            parts.append(_describe_counts(name, counts))
            self._write_scalars(record["step"], f"dynamic_tables/{name}", counts)
        self.line("  ".join(parts))

    def evaluation(self, step: int, metrics: dict[str, float], seconds: float) -> None:
        """Writes the record of an evaluation, and prints it as a line.

        Args:
          step: number of steps done.
          metrics: metric name to value.
          seconds: wall time of the evaluation.
        """
        self.record({"step": step, "evaluation": metrics, "seconds": seconds})
        self._write_scalars(step, "evaluation", metrics)
        shown = "  ".join(f"{name} {value:.5f}" for name, value in metrics.items())
        self.line(f"evaluation after step {step}: {shown}  ({seconds:.1f} s)")

    def saved(self, step: int) -> None:
        """Writes the record of a complete checkpoint, and prints it as a line."""
        self.record({"step": step, "saved": True})
        self.line(f"saved step {step}")

    def plot(self, title: str, metric: str, reference: float | None) -> None:
        """Plots the training loss and a metric of all recorded steps.

        Args:
          title: title of the plot.
          metric: name of the metric.
          reference: value of the metric to mark as that of the teacher, or None.

        Raises:
          MissingPlotLibraryError: if matplotlib is not installed.
        """
        records = list(read_records(self.directory / RECORDS_FILE))
        losses = {r["step"]: r["loss"] for r in records if r.get("loss") is not None}
        values = {
            r["step"]: r["evaluation"][metric]
            for r in records
            if metric in r.get("evaluation", {})
        }
        figure = make_figure(PLOT_FILE, width=10, height=4)
        left, right = figure.subplots(1, 2)
        figure.suptitle(title)
        left.plot(*_points(losses), linewidth=1)
        left.set(xlabel="step", ylabel="training loss")
        right.plot(*_points(values), marker="o")
        right.set(xlabel="step", ylabel=f"{metric}, held-out data")
        if reference is not None:
            right.axhline(reference, color="gray", linestyle="--", label="teacher")
            right.legend()
        figure.savefig(self.directory / PLOT_FILE, dpi=100)

    def close(self) -> None:
        """Closes the files of the records."""
        with self._naming_file():
            self._file.close()
        if self._scalars is not None:
            self._scalars.close()

    @contextlib.contextmanager
    def _naming_file(self) -> Iterator[None]:
        """Adds the name of the records file to an error of writing, as a full disk."""
        try:
            yield
        except OSError as error:
            error.filename = self._file.name
            raise

    def _write_scalars(self, step: int, group: str, record: Record) -> None:
        if self._scalars is not None:
            values = {name: x for name, x in record.items() if name != "step"}
            self._scalars.write(step, group, values)


class SilentReport(RunReport):
    """The report of a process that is not the first of its job: it writes nothing."""

    def __init__(self, directory: pathlib.Path):
        self.directory = directory
        self._scalars = None

    def start_tensorboard(self, first_step: int) -> None:
        """Writes nothing."""

    def line(self, text: str) -> None:
        """Prints nothing."""

    def record(self, record: Record) -> None:
        """Writes nothing."""

    def plot(self, title: str, metric: str, reference: float | None) -> None:
        """Plots nothing."""

    def close(self) -> None:
        """Has no file to close."""


def _describe_counts(name: str, counts: Record) -> str:
    """Returns the counts of a dynamic table as text, without those that are 0."""
    hits = counts["hits"] / max(counts["ids"], 1)
    parts = [f"{name}: {hits:.1%} hits", f"load {counts['load']:.2f}"]
    parts += [
        f"{counts[key]:,} {words}"
        for key, words in (("not_admitted", "not admitted"), ("no_place", "no place"))
        if counts[key]
    ]
    return ", ".join(parts)


def read_records(path: pathlib.Path) -> Iterator[Record]:
    """Yields the records of a run, except incomplete lines of a killed one.

    A step that was repeated after a resume has two records. The later one counts.
    """
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue


def _points(by_step: dict[int, float]) -> tuple[list[int], list[float]]:
    """Returns the steps in order, and the value of each."""
    steps = sorted(by_step)
    return steps, [by_step[step] for step in steps]
