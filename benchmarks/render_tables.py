"""Renders the tables of figures in README.md, docs/ and benchmarks/README.md.

    python benchmarks/render_tables.py [--check]

Each table stands between two marks, `<!-- table: NAME -->` and `<!-- end of table -->`.
Its text comes from `benchmarks/results.json` alone, so no figure is written by hand
twice. `--check` changes nothing and fails if a table is not what the file gives.
"""

import argparse
import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

import waiting
from markdown_tables import (
    Cells,
    Results,
    find_row,
    show_machine,
    show_teacher,
    table,
)
from measured_tables import MEASURED_TABLES, dlrm_summary, peers_summary
from peers_picture import PICTURE, draw
from results_file import load_results

ROOT: Final = pathlib.Path(__file__).parents[1]
GROWTH_TOPOLOGIES: Final = ("v5p:2x2x2", "v5p:16x16x16")
"""Slices that only the table of growth with the number of devices shows."""
_BLOCK: Final = re.compile(
    r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL
)


def render_all(results: Results, *, check: bool = False) -> list[pathlib.Path]:
    """Renders every table; returns the files whose text changes.

    Args:
      results: from `load_results`.
      check: write nothing.
    """
    texts = {path: _render_page(path, results) for path in _pages()}
    if "peers" in results:
        texts[ROOT / "benchmarks" / PICTURE] = draw(results)
        texts[ROOT / "benchmarks" / waiting.PICTURE] = waiting.draw(results)
    changed = []
    for path, text in texts.items():
        if not path.exists() or path.read_text() != text:
            changed.append(path)
            if not check:
                path.write_text(text)
    return changed


def _render_page(path: pathlib.Path, results: Results) -> str:
    """Returns the text of a page with all its tables."""
    return _BLOCK.sub(
        lambda match: match[1] + TABLES[match[2]](results) + match[3], path.read_text()
    )


def _pages() -> Iterator[pathlib.Path]:
    yield ROOT / "README.md"
    yield ROOT / "benchmarks" / "README.md"
    for path in sorted((ROOT / "docs").rglob("*.md")):
        if "_build" not in path.parts:
            yield path


def _summary(results: Results) -> str:
    """The table of the README: sentences that need no other page."""
    rows: list[Cells] = [("result", "measured on", "repeat with")]
    rows += [*dlrm_summary(results), *peers_summary(results)]
    rows.append(_step_time_cells(results))
    rows += _training_cells(results)
    fit = _fit_of(results, config="dlrm_dcnv2", topology="v6e:4x4")
    of_device = fit["table_and_slot_bytes"] + fit["temporary_bytes"]
    rows.append(
        (
            "MLPerf's DLRM-DCNv2, 204 million rows of 128, takes "
            f"{_gigabytes(of_device)} GB of each device's 32 GB",
            f"compiler, {fit['devices']} TPU v6e",
            "`tpu-embedding compile dlrm_dcnv2 --topology v6e:4x4`",
        )
    )
    return table(rows)


def _step_time_cells(results: Results) -> Cells:
    of_devices = [r for r in results["table_size"]["results"] if r["devices"] == 8]
    small, *_, large = sorted(of_devices, key=lambda row: row["rows"])
    return (
        f"A step on a table of {large['rows']:,} rows takes {large['ratio']:.1f} times "
        f"as long as on {small['rows']:,} rows",
        f"8 emulated devices on {show_machine(results['table_size'])}",
        "`python benchmarks/table_size.py --devices 8`",
    )


def _training_cells(results: Results) -> Iterator[Cells]:
    machine = f"8 emulated devices on {show_machine(results['training_runs'])}"
    run = find_row(results, "training_runs", config="synthetic")
    yield (
        f"Learns clicks of a known model to a log loss of {run['value']:.3f}; that "
        f"model itself has {run['teacher']:.3f}",
        machine,
        "`bash scripts/train.sh synthetic --devices 8`",
    )
    run = find_row(results, "training_runs", config="movielens")
    yield (
        f"Predicts ratings of MovieLens-100K with an RMSE of {run['value']:.2f}, in "
        f"{run['seconds']:.0f} s",
        machine,
        "`bash scripts/train.sh movielens --data-dir ml-100k --devices 8`",
    )


def _training(results: Results) -> str:
    rows: list[Cells] = [
        ("config", "metric on held-out data", "value", "teacher", "time of a run")
    ]
    for run in results["training_runs"]["results"]:
        value = f"{run['value']:.4f}"
        if "by_seed" in run:
            value += f" (mean of {', '.join(f'{x:.4f}' for x in run['by_seed'])})"
        teacher = "-"
        if "teacher" in run:
            teacher = show_teacher(run)
        seconds = f"{run['seconds']:.0f} s"
        metric = run["metric"].replace("_", " ")
        rows.append((f"`{run['config']}`", metric, value, teacher, seconds))
    return table(rows)


def _compile_fit(results: Results) -> str:
    head = ("config", "slice", "devices", "kernels", "tables and slots")
    columns = ("temporaries of a step", "temporaries of initial tables")
    rows: list[Cells] = [(*head, *columns, "largest program", "fits")]
    for row in results["compile_fit"]["results"]:
        slices = f"{row['slices']} x " if row["slices"] > 1 else ""
        temporaries = (row["temporary_bytes"], row["init_temporary_bytes"])
        rows.append(
            (
                f"`{row['config']}`",
                slices + row["topology"],
                f"{row['devices']:,}",
                f"`{row['kernels']}`",
                f"{_gigabytes(row['table_and_slot_bytes'])} GB",
                *("-" if b is None else f"{_gigabytes(b)} GB" for b in temporaries),
                f"{row['largest_program']}, {_gigabytes(row['largest_bytes'])} GB",
                "yes" if row["fits"] else "no",
            )
        )
    return table(rows)


def _traffic(results: Results) -> str:
    head = ("slice", "optimizer", "dim", "ids per sample", "minimum, MB")
    columns = ("MB", "of minimum", "compile")
    rows: list[Cells] = [
        (*head, *(f"{b}: {c}" for b in ("XLA", "kernels") for c in columns))
    ]
    for case, by_backend in _traffic_cases(results).items():
        topology, optimizer, dim, valence = case
        known = next(iter(by_backend.values()))
        cells = (topology, optimizer, str(dim), str(valence))
        cells += (_megabytes(known.get("least_hbm_bytes")),)
        for backend in ("xla", "sparse_core"):
            row = by_backend.get(backend, {})
            seconds = row.get("compile_seconds")
            cells += (
                _megabytes(row.get("hbm_bytes")),
                _ratio(row.get("hbm_ratio")),
                "" if seconds is None else f"{seconds:.0f} s",
            )
        rows.append(cells)
    return table(rows)


def _traffic_by_dim(results: Results) -> str:
    """A short table of one slice, for the docs."""
    rows: list[Cells] = [("dim", "XLA", "SparseCore kernels")]
    cases = _traffic_cases(results)
    for dim in (8, 16, 32, 64, 128, 512):
        case = cases.get(("v5p:2x2x1", "adagrad", dim, 1), {})
        ratios = (case.get(b, {}).get("hbm_ratio") for b in ("xla", "sparse_core"))
        rows.append((str(dim), *map(_ratio, ratios)))
    return table(rows)


def _traffic_by_dtype(results: Results) -> str:
    """Float32 tables and others in one step, where both are known."""
    found = {
        (_case(row), row["dtype"]): row
        for row in results["compiled_traffic"]["results"]
        if row["kernels"] == "xla"
    }
    rows: list[Cells] = [
        ("slice", "dim", "dtype", "HBM, MB", "of minimum", "links, MB", "memory, MB")
    ]
    for case in dict.fromkeys(case for case, dtype in found if dtype != "float32"):
        topology, _, dim, _ = case
        for (other, dtype), row in found.items():
            if other == case:
                figures = (
                    _megabytes(row["hbm_bytes"]),
                    _ratio(row["hbm_ratio"]),
                    _megabytes(row["ici_bytes"]),
                    _megabytes(row["table_and_slot_bytes"]),
                )
                rows.append((topology, str(dim), f"`{dtype}`", *figures))
    return table(rows)


def _growth(results: Results) -> str:
    found = {
        (row["topology"], row["dim"], row["kernels"]): row
        for row in _float32_traffic(results)
        if row["topology"] in GROWTH_TOPOLOGIES
    }
    few, many = GROWTH_TOPOLOGIES
    rows: list[Cells] = [
        ("dim", "kernels", "MB on 8 devices", "MB on 4,096 devices", "growth")
    ]
    for topology, dim, kernels in found:
        pair = found.get((few, dim, kernels)), found.get((many, dim, kernels))
        if topology == few and pair[0] and pair[1]:
            sizes = [row["hbm_bytes"] for row in pair if row]
            cells = (*map(_megabytes, sizes), f"{sizes[1] / sizes[0]:.2f}x")
            rows.append((str(dim), f"`{kernels}`", *cells))
    return table(rows)


def _estimate(results: Results) -> str:
    head = ("slice", "jax-tpu-embedding, ms", "this, XLA, ms", "this, kernels, ms")
    rows: list[Cells] = [
        (*head, "arguments, MiB: theirs, this", "compile, s: theirs, this")
    ]
    found = results["compiler_estimate"]["results"]
    for topology in dict.fromkeys(row["topology"] for row in found):
        by_backend = {r["kernels"]: r for r in found if r["topology"] == topology}
        columns = [by_backend.get(b, {}) for b in (None, "xla", "sparse_core")]
        times = (c.get("intercept_ms") for c in columns)
        theirs, ours = columns[0], columns[2] or columns[1]
        rows.append(
            (
                topology,
                *("" if t is None else f"{t:.2f}" for t in times),
                f"{theirs['argument_mib']:.1f}, {ours['argument_mib']:.1f}",
                f"{theirs['compile_seconds']:.0f}, {ours['compile_seconds']:.0f}",
            )
        )
    return table(rows)


def _table_size(results: Results) -> str:
    rows: list[Cells] = [
        ("devices", "rows of the table", "median of a step", "of the smallest")
    ]
    found = results["table_size"]["results"]
    for row in sorted(found, key=lambda row: (row["devices"], row["rows"])):
        ratio = f"{row['ratio']:.2f}x" if "ratio" in row else ""
        cells = (f"{row['rows']:,}", f"{row['median_ms']:.1f} ms", ratio)
        rows.append((str(row["devices"]), *cells))
    return table(rows)


TABLES: Final[dict[str, Callable[[Results], str]]] = {
    "summary": _summary,
    "training": _training,
    "compile_fit": _compile_fit,
    "traffic": _traffic,
    "traffic_by_dim": _traffic_by_dim,
    "traffic_by_dtype": _traffic_by_dtype,
    "growth": _growth,
    "estimate": _estimate,
    "table_size": _table_size,
    "waiting": waiting.render,
    **MEASURED_TABLES,
}


def _traffic_cases(results: Results) -> dict[Any, dict[str, dict[str, Any]]]:
    """Returns the results of each case by backend."""
    cases: dict[Any, dict[str, dict[str, Any]]] = {}
    for row in _float32_traffic(results):
        if row["topology"] not in GROWTH_TOPOLOGIES:
            cases.setdefault(_case(row), {})[row["kernels"]] = row
    return cases


def _float32_traffic(results: Results) -> list[dict[str, Any]]:
    found = results["compiled_traffic"]["results"]
    return [row for row in found if row["dtype"] == "float32"]


def _case(row: dict[str, Any]) -> tuple[str, str, int, int]:
    return row["topology"], row["optimizer"], row["dim"], row["valence"]


def _fit_of(results: Results, **fields: Any) -> dict[str, Any]:
    """Returns a compiled step's memory: with XLA if known, else with kernels."""
    try:
        return find_row(results, "compile_fit", kernels="xla", **fields)
    except KeyError:
        return find_row(results, "compile_fit", **fields)


def _megabytes(num_bytes: float | None) -> str:
    if num_bytes is None:
        return ""
    megabytes = num_bytes / 1e6
    return f"{megabytes:.1f}" if megabytes < 10 else f"{megabytes:,.0f}"


def _gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3g}"


def _ratio(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.1f}x" if value < 10 else f"{value:.0f}x"


def main() -> int:
    """Renders or checks; returns the exit status."""
    parser = argparse.ArgumentParser(description="Renders the tables of figures.")
    parser.add_argument("--check", action="store_true", help="only compare")
    check = parser.parse_args().check
    changed = render_all(load_results(), check=check)
    for path in changed:
        print(f"{'stale' if check else 'rendered'}: {path.relative_to(ROOT)}")
    return 1 if check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
