"""Trains on a table whose columns you know, then scores another file.

Command: python docs/examples/tabular.py train clicks.csv runs/clicks
         python docs/examples/tabular.py score new.csv runs/clicks scores.csv

Without arguments, it does both on made-up clicks. It needs the extra [parquet]. Copy
it, and change COLUMNS and POSITIVE for your file.
"""

import itertools
import json
import pathlib
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from flax import nnx

import tpu_embedding as te

COLUMNS = {  # "category", "number", "date" (ISO 8601), "seconds" (Unix) or "label"
    "user": "category",
    "price": "number",
    "time": "date",
    "clicked": "label",
}
POSITIVE = "yes"  # the label to predict; None predicts the label as a number
DIM, MIN_COUNT, HELD_OUT, NUM_BUCKETS, SCORED = 16, 2, 0.1, 12, 4096
TYPES = {"number": pa.float64(), "date": pa.timestamp("us"), "seconds": pa.int64()}


def read(path, kinds):
    """Returns a pyarrow column by name. Empty cells are null.

    Stops at the first cell that is not of its kind.
    """
    options = pa.csv.ConvertOptions(
        column_types=dict.fromkeys(kinds, pa.string()),
        include_columns=list(kinds),
        null_values=[""],
        strings_can_be_null=True,
    )
    columns, parse = {}, pa.csv.ParseOptions(newlines_in_values=True)
    table = pa.csv.read_csv(path, parse_options=parse, convert_options=options)
    for name, kind in kinds.items():
        texts = table[name].combine_chunks()
        columns[name] = converted(texts, kind)
        if columns[name] is None:
            each = (converted(texts[i : i + 1], kind) for i in range(len(texts)))
            row = next(i for i, value in enumerate(each) if value is None)
            message = f"{path}, row {row + 1}: {name} must be a {kind}, got"
            raise SystemExit(f"{message} {texts[row].as_py()!r}")
    return columns


def converted(texts, kind):
    """Returns a column of its kind, or None if a cell is not of that kind."""
    try:
        values = texts.cast(TYPES.get(kind, pa.string()))
    except pa.ArrowInvalid:
        return None
    is_finite = kind != "number" or pc.all(pc.is_finite(values), min_count=0).as_py()
    return values if is_finite else None


def inputs_of(columns):
    """Returns columns of texts, and float64 numbers with NaN where missing."""
    texts, numbers = {}, {}
    for name, kind in COLUMNS.items():
        if kind == "category":
            texts[name] = columns[name]
        elif kind == "number":
            numbers[name] = columns[name].to_numpy(zero_copy_only=False)
        elif kind in ("date", "seconds"):
            times = columns[name].cast(pa.timestamp("s"), safe=False)
            texts[f"{name} (weekday)"] = pc.day_of_week(times).cast(pa.string())
            texts[f"{name} (hour)"] = pc.hour(times).cast(pa.string())
            seconds = times.cast(pa.int64()).to_numpy(zero_copy_only=False)
            numbers[name] = seconds / 86_400  # days
    return texts, numbers


def fit(texts, numbers, rows):
    """Returns vocabularies, bucket edges and scales of the training rows, for JSON."""
    vocabularies, edges, scales = {}, {}, {}
    for name, values in texts.items():
        counts = values.take(pa.array(rows)).drop_null().value_counts()
        is_kept = pc.greater_equal(counts.field("counts"), MIN_COUNT)
        vocabularies[name] = sorted(counts.field("values").filter(is_kept).to_pylist())
    for name, values in numbers.items():
        known = values[rows][~np.isnan(values[rows])]
        known = known if len(known) else np.zeros(1)
        shares = np.linspace(0, 1, NUM_BUCKETS + 1)[1:-1]
        edges[name] = np.unique(np.quantile(known, shares)).tolist()
        forms = (np.arcsinh(known), known)  # arcsinh: a logarithm of either sign
        scales[name] = [[float(x.mean()), float(x.std()) or 1.0] for x in forms]
    return {"vocabularies": vocabularies, "edges": edges, "scales": scales}


def encode(texts, numbers, fitted):
    """Returns int32 ids `[rows]` by table, and float32 numbers `[rows, inputs]`."""
    ids, inputs, padding = {}, [], te.inputs.PADDING_ROW_ID  # padding has no row
    for name, values in texts.items():
        known = pa.array(fitted["vocabularies"][name], pa.string())
        found = pc.add(pc.index_in(values, known), 1).fill_null(0)  # 0: other texts
        is_missing = values.is_null().to_numpy(zero_copy_only=False)
        ids[name] = np.where(is_missing, padding, found.to_numpy()).astype(np.int32)
    for name, values in numbers.items():
        bucket = np.searchsorted(fitted["edges"][name], values, side="right")
        missing = np.isnan(values)
        ids[f"{name} (bucket)"] = np.where(missing, padding, bucket).astype(np.int32)
        forms = zip((np.arcsinh(values), values), fitted["scales"][name], strict=True)
        scaled = [(x - mean) / deviation for x, (mean, deviation) in forms]
        inputs += [np.where(missing, 0, np.clip(x, -5, 5)) for x in scaled]
        inputs.append(missing)
    num_rows = len(next(iter(ids.values())))
    return ids, np.array(inputs, np.float32).reshape(-1, num_rows).T


class Model(nnx.Module):
    """An MLP of the rows, their scalar products, and the numbers."""

    def __init__(self, fitted, rule=None):
        sizes = {name: len(x) + 1 for name, x in fitted["vocabularies"].items()}
        sizes |= {f"{name} (bucket)": len(x) + 1 for name, x in fitted["edges"].items()}
        options = {"dim": DIM, "initializer": te.initializers.normal(0.01)}
        features = {}
        for name, size in sizes.items():
            table = te.TableConfig(vocabulary_size=size, name=name, **options)
            features[name] = te.FeatureConfig(table=table)
        self.tables = te.TPUEmbedding(features, rule, rngs=nnx.Rngs(0))
        num_pairs = len(sizes) * (len(sizes) - 1) // 2
        widths = [len(sizes) * DIM + num_pairs + 3 * len(fitted["edges"]), 64, 32, 1]
        pairs, rngs = itertools.pairwise(widths), nnx.Rngs(0)
        first, second, last = (nnx.Linear(*pair, rngs=rngs) for pair in pairs)
        self.mlp = nnx.Sequential(first, nnx.silu, second, nnx.silu, last)

    def __call__(self, ids, numbers):
        rows = list(self.tables(ids).values())
        products = te.nn.DotInteraction()(rows)
        return self.mlp(jnp.concatenate([*rows, products, numbers], axis=1))[:, 0]


@nnx.jit(donate_argnums=(0, 1))
def train_step(model, optimizer, ids, numbers, labels):
    def loss_fn(model):
        scores = model(ids, numbers)
        if POSITIVE is None:
            return jnp.mean((scores - labels) ** 2)
        return optax.sigmoid_binary_cross_entropy(scores, labels).mean()

    loss, gradients = te.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


def predict(model, ids, numbers):
    """Returns a float32 score per row, in batches of one size."""
    score, scores = nnx.jit(Model.__call__), []
    for start in range(0, len(numbers), SCORED):
        rows = np.arange(start, start + SCORED) % len(numbers)
        batch = {name: x[rows] for name, x in ids.items()}
        scores.append(np.asarray(score(model, batch, numbers[rows])))
    return np.concatenate(scores)[: len(numbers)]


def train(path, directory):
    """Trains, prints a metric of the held-out rows, and saves the best model."""
    (label,) = (name for name, kind in COLUMNS.items() if kind == "label")
    columns = read(path, COLUMNS if POSITIVE else COLUMNS | {label: "number"})
    (texts, numbers), labels = inputs_of(columns), columns[label]
    if (row := labels.is_null().index(True).as_py() + 1) > 0:
        raise SystemExit(f"{path}, row {row}: {label} must not be empty")
    random = np.random.default_rng(0)
    is_held_out = random.random(len(labels)) < HELD_OUT
    rows, held_out = np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)
    if POSITIVE:
        targets, scale = pc.equal(labels, POSITIVE).cast(pa.float64()), (0.0, 1.0)
    else:  # Scaled in float64, where large labels keep their digits.
        targets, fitted = labels, labels.to_numpy()[rows]
        scale = float(fitted.mean()), float(fitted.std()) or 1.0
    targets = ((targets.to_numpy() - scale[0]) / scale[1]).astype(np.float32)
    fitted = fit(texts, numbers, rows) | {"scale": scale}
    ids, inputs = encode(texts, numbers, fitted)
    size = min(2 ** min(max(5, (len(rows) // 500).bit_length()), 12), len(rows))
    num_steps = max(20, (2 if len(rows) >= 5000 else 3) * len(rows) // size)
    num_epochs = 1 + num_steps * size // len(rows)
    order = np.concatenate([random.permutation(rows) for _ in range(num_epochs)])

    def part(rows):
        return {name: x[rows] for name, x in ids.items()}, inputs[rows]

    rates = [optax.linear_schedule(x, 0.02 * x, num_steps) for x in (0.1, 0.004)]
    rule = te.optimizers.adagrad(rates[0], initial_accumulator_value=1e-4)
    model, best, results = Model(fitted, rule), None, []
    measure = te.metrics.AUC if POSITIVE else te.metrics.RMSE
    optimizer = te.Optimizer(model, optax.adam(rates[1]))
    for step in range(num_steps):
        batch = order[step * size : (step + 1) * size]
        loss = train_step(model, optimizer, *part(batch), targets[batch])
        if step + 1 == num_steps or (step + 1) % -(-num_steps // 5) == 0:
            found = predict(model, *part(held_out))
            result = measure.from_batch(found, targets[held_out]).compute() * scale[1]
            print(f"step {step + 1:6,}: loss {loss:.4f}, held-out {result:.4f}")
            results.append(result if POSITIVE else -result)
            if results[-1] == max(results):
                best = jax.tree.map(jnp.copy, nnx.state(model))
    nnx.update(model, best)
    te.save(directory / "model", model)
    (directory / "fitted.json").write_text(json.dumps(fitted))
    return abs(max(results))


def score(path, directory, output):
    """Writes a probability, or a number in the label's units, per row of a file."""
    fitted = json.loads((directory / "fitted.json").read_text())
    kinds = {name: kind for name, kind in COLUMNS.items() if kind != "label"}
    ids, inputs = encode(*inputs_of(read(path, kinds)), fitted)
    model = te.restore(directory / "model", Model(fitted))
    mean, deviation = fitted["scale"]
    scores = mean + deviation * predict(model, ids, inputs).astype(np.float64)
    scores = 1 / (1 + np.exp(-scores)) if POSITIVE else scores
    pa.csv.write_csv(pa.table({"score": scores}), output)
    return scores


def write_clicks(path):
    """Writes made-up clicks: each user has a favourite day and a highest price."""
    random = np.random.default_rng(0)
    users, days = random.integers(50, size=4000), random.integers(20_000, size=4000)
    prices = random.gamma(2, 10, 4000).round(2)
    is_liked = (days % 7 == users % 7) | (prices < users)
    clicked = np.where(is_liked ^ (random.random(4000) < 0.1), "yes", "no")
    names, times = [f"u{user}" for user in users], days.astype("M8[D]")
    table = {"user": names, "price": prices, "time": times, "clicked": clicked}
    pa.csv.write_csv(pa.table(table), path)


if __name__ == "__main__":
    command, *paths = sys.argv[1:] or ["demo"]
    if command == "demo":
        folder = pathlib.Path(tempfile.mkdtemp())
        paths = [folder / "clicks.csv", folder / "run", folder / "scores.csv"]
        write_clicks(paths[0])
        result, scores = train(*paths[:2]), score(*paths)
        print(f"scores of {len(scores):,} rows, such as {scores[:3].round(3)}")
    else:
        {"train": train, "score": score}[command](*map(pathlib.Path, paths))
