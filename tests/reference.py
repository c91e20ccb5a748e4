"""The dense reference: one table, `table[ids]`, dense gradient, plain formulas.

NumPy in float64, written sample by sample so that it can be checked by reading.
"""

import numpy as np

import tpu_embedding as te


def samples_of(ids, feature):
    """Returns, per output sample, the list of (id, weight) that it combines."""
    if isinstance(ids, te.RaggedIds):
        weights = np.ones(len(ids.values)) if ids.weights is None else ids.weights
        rows = [
            list(zip(ids.values[a:b], weights[a:b], strict=True))
            for a, b in zip(ids.row_splits[:-1], ids.row_splits[1:], strict=True)
        ]
    else:
        if not isinstance(ids, te.DenseIds):
            ids = te.DenseIds(ids=ids)
        matrix = np.asarray(ids.ids).reshape(len(ids.ids), -1)
        weights = np.ones(matrix.shape) if ids.weights is None else ids.weights
        weights = np.asarray(weights).reshape(matrix.shape)
        rows = [
            list(zip(a, b, strict=True)) for a, b in zip(matrix, weights, strict=True)
        ]
    return bags_of(rows, feature)


def bags_of(rows, feature):
    """Returns the list of (id, weight) of each output sample, and their combiner.

    Args:
      rows: per sample, its list of (id, weight).
      feature: a sequence's samples give one output sample per position.
    """
    length = feature.config.max_sequence_length
    if feature.config.output_shape is not None:
        outputs = int(np.prod(feature.config.output_shape))
        length = 0 if outputs == len(rows) else outputs // len(rows)
    if length:
        rows = [
            [(row[i][0], 1.0)] if i < len(row) else []
            for row in rows
            for i in range(length)
        ]
        return rows, "sum"
    return rows, feature.combiner


def gains_of(bag, combiner, feature):
    """Returns the (row, gain) pairs of one bag, policies applied."""
    vocabulary_size = feature.table.vocabulary_size
    kept = []
    for row, weight in bag:
        if row == te.inputs.PADDING_ROW_ID:
            continue
        if feature.config.out_of_range_ids == "clip":
            row = min(max(row, 0), vocabulary_size - 1)
        if not 0 <= row < vocabulary_size:
            continue
        validates = feature.config.validate_weights_and_indices
        if validates and combiner != "sum" and weight <= 0:
            continue
        kept.append((int(row), float(weight)))
    if not kept and feature.config.default_id is not None:
        return [(feature.config.default_id, 1.0)]
    if combiner == "sum":
        return kept
    if combiner == "mean":
        denominator = sum(weight for _, weight in kept)
    else:
        denominator = np.sqrt(sum(weight**2 for _, weight in kept))
    return [(row, weight / denominator if denominator else 0.0) for row, weight in kept]


def dense_lookup(tables, features, plan):
    """Returns the activations of every feature, `[samples, dim]`, float64."""
    activations = {}
    for feature, ids in zip(plan.features, plan.flatten(features), strict=True):
        bags, combiner = samples_of(ids, feature)
        table = np.asarray(tables[table_name(feature, plan)], np.float64)
        result = np.zeros((len(bags), table.shape[1]))
        for i, bag in enumerate(bags):
            for row, gain in gains_of(bag, combiner, feature):
                result[i] += gain * table[row]
        activations[feature.name] = result
    return activations


def dense_gradients(tables, features, cotangents, plan):
    """Returns per table the dense gradient, and which rows were looked up."""
    gradients = {name: np.zeros(t.shape) for name, t in tables.items()}
    touched = {name: np.zeros(len(t), bool) for name, t in tables.items()}
    for feature, ids in zip(plan.features, plan.flatten(features), strict=True):
        name = table_name(feature, plan)
        bags, combiner = samples_of(ids, feature)
        cotangent = np.asarray(cotangents[feature.name], np.float64)
        cotangent = cotangent.reshape(len(bags), -1)
        for i, bag in enumerate(bags):
            for row, gain in gains_of(bag, combiner, feature):
                gradients[name][row] += gain * cotangent[i]
                touched[name][row] = True
    return gradients, touched


def table_name(feature, plan):
    """Returns the name of the table a feature looks up in."""
    stack = plan.stacks[feature.stack_index]
    return next(t.name for t in stack.tables if t.row_offset == feature.row_offset)
