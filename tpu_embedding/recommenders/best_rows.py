"""Retrieves the rows of a table with the largest scalar products, exactly.

Every row is scored, block by block, so no device holds the scores of a whole table.
Each device finds the best of its own rows for all queries. After one all-to-all, each
device merges the results for its share of the queries.
"""

import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from tpu_embedding.argument_checks import check_mapping, invalid
from tpu_embedding.functional.serving_lookup import rows_of_table
from tpu_embedding.lookup._rounds import quantize
from tpu_embedding.plan.check_rows import check_tables
from tpu_embedding.plan.plan import EmbeddingPlan, StackPlan, TablePlan
from tpu_embedding.plan.shard_map import in_auto_axes, on_shards
from tpu_embedding.recommenders.metric import cast_ids
from tpu_embedding.rows.access import gather_rows
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.transfers import moves_arrays
from tpu_embedding.types import PADDING_ROW_ID

Transform = Callable[[Float[Array, "rows dim"]], Float[Array, "rows query_dim"]]
"""Maps rows to the vectors that queries are compared with."""

ReadVectors = Callable[
    [Int[Array, " n"]], tuple[Float[Array, "n query_dim"], Int[Array, " n"]]
]
"""Returns the vectors of rows, given their numbers on the device, and their ids.

Ids increase with the numbers. Rows outside the table have the id `PADDING_ROW_ID`."""

ROWS_PER_BLOCK: Final = 8192
"""Rows that are scored at a time: 32 MiB of scores for 1,024 queries."""

LOWEST_SCORE: Final = float(np.finfo(np.float32).min)
"""Score of rows whose scalar product is NaN or -inf. Padding has -inf."""


class TopK(NamedTuple):
    """The best rows for each query, best first.

    Attributes:
      scores: float32 `[queries, k]`, scalar products.
      ids: int32 `[queries, k]`, numbers of the rows in their table.

    Example:
      >>> best = TopK(scores=jnp.array([[1.0, 0.5]]), ids=jnp.array([[7, 2]]))
      >>> best.ids[:, 0].tolist()  # the best row for each query
      [7]
    """

    scores: Float[Array, "queries k"]
    ids: Int[Array, "queries k"]


@moves_arrays
def top_k(
    tables: Mapping[str, PackedRows | Array],
    queries: Float[Array, "queries query_dim"],
    plan: EmbeddingPlan,
    k: int,
    *,
    table: str | None = None,
    transform: Transform | None = None,
    excluded: Int[Array, "queries n"] | None = None,
) -> TopK:
    """Returns the `k` rows of a table with the largest scalar product with each query.

    The result is exact, and the same on any number of devices up to float32 rounding of
    the scores. Rows with equal scores are ordered by id. Time is proportional to the
    number of queries times the number of rows. Outside `jax.jit`, each call with a
    `transform` recompiles, unless it is a `jax.tree_util.Partial`.

    Args:
      tables: packed rows by stack name, from `init_tables`; or, as in exported
        programs, whole tables by table name, in logical order on one device.
      queries: `[queries, dim]`, as wide as the rows, or as the output of `transform`.
        They are converted to float32. Global.
      plan: plan of the layer.
      k: number of rows, from 1 to the vocabulary size.
      table: name of the table, optional if the plan has only one.
      transform: function that maps rows `[rows, dim]` to the vectors to compare with,
        such as an item tower. It must treat each row independently. By default, rows
        are compared directly.
      excluded: ids not to return for each query, such as items that a user has seen.
        They can be in any order, and are padded with `te.inputs.PADDING_ROW_ID`. The
        array can be empty.

    Returns:
      Scores and ids. If fewer than `k` rows are left after exclusions, the remaining
      entries are `-inf` and `te.inputs.PADDING_ROW_ID`.

    Raises:
      ValueError: if `k`, the table's name, the width of the queries or `excluded`
        doesn't fit, or if the table's ids are not row numbers.

    Example:
      >>> import tpu_embedding as te
      >>> movies = te.TableConfig(vocabulary_size=3, dim=2, name="movies")
      >>> plan = te.make_plan(te.FeatureConfig(table=movies))
      >>> tables = te.functional.init_tables(plan, jax.random.key(0))
      >>> rows = {"movies": np.array([[1.0, 0.0], [0.0, 1.0], [0.5, 0.7]])}
      >>> tables, _ = te.functional.with_table_values(tables, rows, plan, {})
      >>> best = te.functional.top_k(tables, jnp.array([[1.0, 0.0]]), plan, 2)
      >>> best.ids.tolist(), best.scores.tolist()
      ([[0, 2]], [[1.0, 0.5]])
    """
    check_mapping("top_k: tables", tables, "te.nn.top_k(layer, queries, k)")
    stack, member = find_table(plan, table)
    queries = jnp.asarray(queries)
    row = jax.ShapeDtypeStruct((1, member.config.dim), jnp.float32)
    vector = row if transform is None else jax.eval_shape(transform, row)
    check_search("top_k", queries, k, member.num_rows, vector.shape)
    excluded = checked_exclusions(excluded, queries.shape[0])
    rows = tables.get(member.name)
    if not isinstance(rows, jax.Array):
        check_tables(tables, [stack])
        rows = tables[stack.name]
        if not rows.holds_all_rows:
            field = f"top_k: all rows of table {member.name!r}"
            fix = (
                "Search an export, which has whole tables (te.export.load), or pass "
                "{name: layer.embedding_tables()[name]}."
            )
            raise invalid(field, "be on the devices", str(stack.storage), fix)
    arrays = (rows, queries.astype(jnp.float32), excluded)
    sizes = {"k": operator.index(k), "stack": stack, "member": member, "plan": plan}
    if transform is None or isinstance(transform, jax.tree_util.Partial):
        return _compiled_search(*arrays, transform, **sizes)
    # Compile again: the function may read a model that has changed since the last call.
    search = functools.partial(_search, transform=transform, **sizes)
    return jax.jit(search)(*arrays)


def _search(
    rows: PackedRows | Array,
    queries: Float[Array, "queries query_dim"],
    excluded: Int[Array, "queries n"],
    transform: Transform | None,
    *,
    k: int,
    stack: StackPlan,
    member: TablePlan,
    plan: EmbeddingPlan,
) -> TopK:
    """Returns the best rows of a table on one or several devices; see `top_k`."""
    num_queries = queries.shape[0]

    def vectors_of(rows: Array) -> Array:
        if stack.quantization is not None:  # as in a lookup
            rows = quantize(rows, stack.quantization)
        return rows if transform is None else transform(rows).astype(jnp.float32)

    if isinstance(rows, jax.Array):
        table = rows
        read = lambda ids: vectors_of(rows_of_table(table, ids))  # noqa: E731
        return best_of_all(queries, read, member.num_rows, excluded, k)
    num_shards = stack.num_shards
    replica_spec = PartitionSpec(stack.replica_axes)
    device_spec = PartitionSpec((*stack.replica_axes, *stack.shard_axes))

    def search_shard(rows: PackedRows, queries: Array, excluded: Array) -> TopK:
        shard = jax.lax.axis_index(stack.shard_axes) if num_shards > 1 else 0
        # The table's first row on the shard.
        first = (member.row_offset + num_shards - 1 - shard) // num_shards

        def read(numbers: Array) -> tuple[Array, Array]:
            on_shard = first + numbers
            ids = on_shard * num_shards + shard - member.row_offset
            is_row = (ids >= 0) & (ids < member.num_rows)
            values = gather_rows(rows, stack.layout.dealt(on_shard)).astype(jnp.float32)
            return vectors_of(values), jnp.where(is_row, ids, PADDING_ROW_ID)

        num_rows = -(-member.num_rows // num_shards)
        num_best = min(k + excluded.shape[1], member.num_rows)  # Some may be excluded.
        best = _best_of_device(queries, read, num_rows, num_best)
        if num_shards > 1:  # Each device merges its share of the queries.
            best = jax.tree.map(
                lambda x: jax.lax.all_to_all(x, stack.shard_axes, 0, 1, tiled=True),
                best,
            )
        return _merged(best, excluded, k)

    def run(rows: PackedRows, queries: Array, excluded: Array) -> TopK:
        # Pad with queries of zeros, so that devices share the queries equally.
        room = ((0, -num_queries % plan.num_shards), (0, 0))
        queries, excluded = jnp.pad(queries, room), jnp.pad(excluded, room)
        best = on_shards(
            search_shard,
            plan,
            in_specs=(stack.rows_spec, replica_spec, device_spec),
            out_specs=device_spec,
        )(rows, queries, excluded)
        return jax.tree.map(lambda x: x[:num_queries], best)

    divides = num_queries % plan.num_shards == 0
    on_mesh = in_auto_axes(run, plan, device_spec if divides else PartitionSpec())
    return on_mesh(rows, queries, excluded)


_compiled_search = jax.jit(_search, static_argnames=("k", "stack", "member", "plan"))
"""Compiles once per shape, even if it is called outside of `jit`."""


def find_table(plan: EmbeddingPlan, name: str | None) -> tuple[StackPlan, TablePlan]:
    """Returns the plans of a table and its stack. The ids must be row numbers.

    The name may be None if the plan has only one table.
    """
    known = {table.name: (s, table) for s in plan.stacks for table in s.tables}
    if name is None and len(known) == 1:
        (name,) = known
    if name not in known:
        raise invalid("top_k: table", f"name one of the tables {sorted(known)}", name)
    stack, member = known[name]
    vocabulary = stack.vocabulary
    if not vocabulary.ids_are_rows:
        fix = (
            f"{vocabulary.instead_of_row_numbers} Score the rows with "
            "jax.lax.top_k(queries @ rows.T, k)."
        )
        field = f"top_k: the ids of table {name!r}"
        raise invalid(field, "be row numbers", vocabulary, fix)
    return stack, member


def check_search(
    owner: str, queries: Any, k: int, num_rows: int, vector_shape: tuple[int, ...]
) -> None:
    """Raises ValueError if `k` or the queries don't fit the rows or their vectors.

    `vector_shape` is the shape of the vectors of one row.
    """
    if not 1 <= k <= num_rows:
        raise invalid(f"{owner}: k", f"be from 1 to {num_rows}, the number of rows", k)
    if queries.ndim != 2 or vector_shape != (1, queries.shape[-1]):
        rule = f"be [queries, dim], as wide as the vectors, {list(vector_shape)} of one"
        raise invalid(f"{owner}: queries", rule, list(queries.shape))


def checked_exclusions(excluded: Any, num_queries: int) -> Int[Array, "queries n"]:
    """Returns the excluded ids as int32.

    Raises:
      ValueError: if they are not integers, or have the wrong shape.
    """
    if excluded is None:
        return jnp.zeros((num_queries, 0), jnp.int32)
    if not isinstance(excluded, jax.Array):
        try:
            excluded = np.asarray(excluded)
        except ValueError as error:
            fix = "Pad lists to equal lengths with te.inputs.PADDING_ROW_ID."
            raise invalid("top_k: excluded", "be one array", excluded, fix) from error
    # NumPy makes empty lists float64.
    is_integer = jnp.issubdtype(excluded.dtype, jnp.integer) or excluded.size == 0
    if not is_integer or excluded.ndim != 2 or excluded.shape[0] != num_queries:
        rule = f"be integers [{num_queries}, n], some ids for each query"
        raise invalid("top_k: excluded", rule, excluded)
    # Ids beyond int32 can't match a row, and JAX would truncate them.
    excluded, fits = cast_ids(excluded, np.int32)
    return jnp.where(fits, excluded, PADDING_ROW_ID)


def best_of_all(
    queries: Float[Array, "queries query_dim"],
    vectors_of: Callable[[Int[Array, " n"]], Float[Array, "n query_dim"]],
    num_rows: int,
    excluded: Int[Array, "queries n"],
    k: int,
) -> TopK:
    """Returns the best of all rows if each device has them all.

    `vectors_of` returns the vectors of some ids. Those of `PADDING_ROW_ID` don't count.
    """

    def read(numbers: Array) -> tuple[Array, Array]:
        ids = jnp.where(numbers < num_rows, numbers, PADDING_ROW_ID)
        return vectors_of(ids), ids

    num_best = min(k + excluded.shape[1], num_rows)  # Some may be excluded.
    best = _best_of_device(queries, read, num_rows, num_best)
    return _merged(best, excluded, k)


def _best_of_device(
    queries: Float[Array, "queries query_dim"],
    read: ReadVectors,
    num_rows: int,
    num_best: int,
) -> TopK:
    """Returns the best rows of one device, or all its rows if it has fewer.

    The function reads `num_rows` rows, and returns the best `num_best` of them.
    """
    num_queries = queries.shape[0]
    num_best, size = min(num_best, num_rows), min(ROWS_PER_BLOCK, num_rows)

    def add_block(i: Any, best: TopK) -> TopK:
        first = jnp.asarray(i * size, jnp.int32)  # int64 under `jax_enable_x64`
        vectors, ids = read(first + jnp.arange(size, dtype=jnp.int32))
        scores = jnp.matmul(queries, vectors.T, precision=jax.lax.Precision.HIGHEST)
        scores = jnp.where(scores > LOWEST_SCORE, scores, LOWEST_SCORE)  # also NaN
        scores = jnp.where(scores == 0, 0.0, scores)  # -0.0 equals 0.0
        scores = jnp.where((ids == PADDING_ROW_ID)[None], -jnp.inf, scores)
        scores = jnp.concatenate([best.scores, scores], axis=1)
        ids = jnp.broadcast_to(ids[None], (num_queries, size))
        ids = jnp.concatenate([best.ids, ids], axis=1)
        # The first of several equal scores is kept. Earlier blocks have lower ids.
        scores, positions = jax.lax.top_k(scores, num_best)
        return TopK(scores, jnp.take_along_axis(ids, positions, axis=1))

    shape = (num_queries, num_best)
    no_ids = jnp.full(shape, PADDING_ROW_ID, jnp.int32)
    none = TopK(jnp.full(shape, -jnp.inf, jnp.float32), no_ids)
    return jax.lax.fori_loop(0, math.ceil(num_rows / size), add_block, none)


def _merged(best: TopK, excluded: Int[Array, "queries n"], k: int) -> TopK:
    """Merges the best rows of several devices. Equal scores are ordered by id."""
    scores, ids = best
    if excluded.shape[1]:  # XLA:CPU of jax 0.11 crashes on an empty comparison.
        is_excluded = jnp.any(ids[:, :, None] == excluded[:, None, :], axis=2)
        scores = jnp.where(is_excluded, -jnp.inf, scores)
        ids = jnp.where(is_excluded, PADDING_ROW_ID, ids)
    keys, ids = jax.lax.sort((-scores, ids), dimension=1, num_keys=2)
    return TopK(-keys[:, :k], ids[:, :k])
