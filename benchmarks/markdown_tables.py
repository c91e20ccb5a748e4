"""Shared by the modules that turn figures into tables in Markdown."""

from typing import Any

from results_file import Benchmark

Results = dict[str, Benchmark]
Cells = tuple[str, ...]

NOT_MEASURED = "Not measured yet.\n"


def table(rows: list[Cells]) -> str:
    """Returns a table; the first row is its head."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join(lines) + "\n"


def find_row(results: Results, benchmark: str, **fields: Any) -> dict[str, Any]:
    """Returns the first result whose fields have the given values.

    Raises:
      KeyError: if there is none.
    """
    for row in results.get(benchmark, {"results": []})["results"]:
        if all(row.get(name) == value for name, value in fields.items()):
            return row
    raise KeyError(f"results.json has no result {fields} of {benchmark!r}.")


def show_machine(benchmark: Benchmark) -> str:
    """Returns the machine of the latest results, with its CPU if that is recorded."""
    model = benchmark.get("cpu", {}).get("model")
    return f"{benchmark['machine']}, {model}" if model else benchmark["machine"]


def show_processor(row: dict[str, Any]) -> str:
    """Returns the model and the instruction sets of a result's CPU as text."""
    if "cpu" not in row:
        return "not recorded"
    return f"{row['cpu']['model']}: {' '.join(row['cpu']['instruction_sets'])}"


def show_teacher(run: dict[str, Any]) -> str:
    """Returns the teacher's value, and how near a training run comes to it."""
    text = f"{run['teacher']:.4f}"
    if "ratio" in run:
        return f"{text} (ratio {run['ratio']:.4f})"
    if "share_of_lead" in run:
        return f"{text} ({run['share_of_lead']:.4f} of its lead over 0.5)"
    return text


def show_time(milliseconds: float) -> str:
    """Returns a time as text, with three digits or the thousands apart."""
    if milliseconds < 10:
        return f"{milliseconds:.2f}"
    return f"{milliseconds:.1f}" if milliseconds < 100 else f"{milliseconds:,.0f}"
