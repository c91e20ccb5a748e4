"""What a run tells: lines on the screen, records in a file, and a plot of both curves.

Lines carry no control characters, so that they read the same in a terminal and in a
file. Records are JSON, one a line: first `{"run": ...}`, then `{"step": ..., "loss":
...}` and `{"step": ..., "evaluation": ...}`, last `{"result": ...}`. A resumed run
appends another `{"run": ...}` and goes on.
"""

import json
import pathlib
from collections.abc import Iterator
from typing import Any, Final

RECORDS_FILE: Final = "metrics.jsonl"
PLOT_FILE: Final = "curves.png"

Record = dict[str, Any]


class MissingPlotLibraryError(ImportError):
    """The plot of a run needs matplotlib, which is not installed."""


def load_figure_class() -> Any:
    """Returns matplotlib's class of figures; only a plot needs this library.

    Raises:
      MissingPlotLibraryError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPlotLibraryError(
            f"{PLOT_FILE}, the plot of a training run, needs matplotlib, which is not "
            "installed. Install tpu-embedding with its extra `train`: "
            "pip install 'tpu-embedding[train]'"
        ) from error
    return Figure


class RunReport:
    """Writer of one run's lines, records and plot.

    Attributes:
      directory: where records and plot are.
    """

    def __init__(self, directory: pathlib.Path):
        """Opens the file of records to append to it; makes the directory."""
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / RECORDS_FILE
        # A kill may have left half a line, which the next record must not join.
        is_torn = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
        self._file = path.open("a", encoding="utf-8")
        if is_torn:
            self._file.write("\n")

    def line(self, text: str) -> None:
        """Prints a line."""
        print(text, flush=True)

    def record(self, record: Record) -> None:
        """Writes a record, and sees to it that a kill does not lose it."""
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def progress(self, record: Record, num_steps: int) -> None:
        """Reports a step: its record, and a line of the same."""
        self.record(record)
        parts = [
            f"step {record['step']:>{len(str(num_steps))}}/{num_steps}",
            f"loss {record['loss']:.5f}",
        ]
        if record["steps_per_second"] is not None:
            parts.append(f"{record['steps_per_second']:.1f} steps/s")
            parts.append(f"{record['samples_per_second']:,.0f} samples/s")
        parts.append(f"rounds {record['rounds']}")
        if record["out_of_range"]:
            parts.append(f"ids out of range {record['out_of_range']:,}")
        self.line("  ".join(parts))

    def evaluation(self, step: int, metrics: dict[str, float], seconds: float) -> None:
        """Reports an evaluation."""
        self.record({"step": step, "evaluation": metrics, "seconds": seconds})
        shown = "  ".join(f"{name} {value:.5f}" for name, value in metrics.items())
        self.line(f"evaluation after step {step}: {shown}  ({seconds:.1f} s)")

    def plot(self, title: str, metric: str, reference: float | None) -> None:
        """Draws loss and main metric over the steps, of all that was recorded."""
        records = list(read_records(self.directory / RECORDS_FILE))
        losses = {r["step"]: r["loss"] for r in records if "loss" in r}
        values = {
            r["step"]: r["evaluation"][metric] for r in records if "evaluation" in r
        }
        figure = load_figure_class()(figsize=(10, 4), layout="constrained")
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
        """Closes the file of records."""
        self._file.close()


def read_records(path: pathlib.Path) -> Iterator[Record]:
    """Yields the records of a run; leaves out a line that a kill cut short.

    Steps that were done again after a resume have two records; the later one counts.
    """
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue


def _points(by_step: dict[int, float]) -> tuple[list[int], list[float]]:
    steps = sorted(by_step)
    return steps, [by_step[step] for step in steps]
