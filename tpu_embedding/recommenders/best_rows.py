"""Retrieves the rows with the largest scalar products, exactly.

Each device scores its own rows for all queries, block by block, so no device holds all
scores. After one all-to-all, each device merges the results for its share of queries.
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
"""Reads vectors and ids, given row numbers on the device.

Ids ascend with the row numbers. Rows outside the table have the id `PADDING_ROW_ID`."""

ROWS_PER_BLOCK: Final = 8192
"""Rows scored at a time: 32 MiB of scores for 1,024 queries."""

LOWEST_SCORE: Final = float(np.finfo(np.float32).min)
"""Score for rows whose product is NaN or -inf. Padding has -inf, which ranks lower."""


class TopK(NamedTuple):
    """The best rows for each query, best first.

    Attributes:
      scores: float32 `[queries, k]`, scalar products.
      ids: int32 `[queries, k]`, row numbers in the table.

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
    """Finds the `k` rows whose scalar products with each query are largest.

    The result is exact and, up to float32 rounding, the same on any number of devices.
    Rows with equal scores are ordered by id. The time is proportional to the number of
    queries times the number of rows. Note that outside `jax.jit`, each call with a
    `transform` recompiles, unless you pass a `jax.tree_util.Partial`.

    Args:
      tables: packed rows by stack name, from `init_tables`. Exported programs pass
        whole tables by table name instead. Their rows are in id order, on one device.
      queries: global `[queries, dim]`, as wide as the rows or the `transform` output.
        Converted to float32.
      plan: plan that placed the tables.
      k: number of rows, from 1 to the vocabulary size.
      table: table name, optional if the plan has only one.
      transform: maps rows `[rows, dim]` to the vectors that queries are compared with,
        such as an item tower. It must treat each row independently. By default, queries
        are compared with the rows.
      excluded: ids not to return for each query, such as items that a user has seen, in
        any order. Pad them with `te.inputs.PADDING_ROW_ID`. The array can be empty.

    Returns:
      Scores and ids. If exclusions leave fewer than `k` rows, the remaining scores are
      `-inf`, and the remaining ids are `te.inputs.PADDING_ROW_ID`.

    Raises:
      ValueError: if `k`, the table name, the query width or `excluded` doesn't fit, or
        if the table's ids are not row numbers.

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
    # A table may share its name with a stack, so the type decides: an array is a whole
    # table, and packed rows belong to a stack.
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
    # A plain function may read a model that has changed since the last call, so a
    # compiled program can't be reused. With a Partial, it can, because the Partial's
    # leaves are arguments of the program.
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
    num_queries = queries.shape[0]

    def vectors_of(rows: Array) -> Array:
        if stack.quantization is not None:
            # Quantize as in a lookup, so that scores agree with the rows that a lookup
            # reads.
            rows = quantize(rows, stack.quantization)
        return rows if transform is None else transform(rows).astype(jnp.float32)

    if isinstance(rows, jax.Array):
        table = rows
        read = lambda ids: vectors_of(rows_of_table(table, ids))  # noqa: E731
        return best_of_all(queries, read, member.num_rows, excluded, k)
    num_shards = stack.num_shards
    # Each replica of the rows handles a share of the queries. Within a replica, each
    # shard scores all of the replica's queries.
    replica_spec = PartitionSpec(stack.replica_axes)
    device_spec = PartitionSpec((*stack.replica_axes, *stack.shard_axes))

    def search_shard(rows: PackedRows, queries: Array, excluded: Array) -> TopK:
        shard = jax.lax.axis_index(stack.shard_axes) if num_shards > 1 else 0
        # First table row on this shard. Stack row `q` is on shard `q % num_shards`.
        first = (member.row_offset + num_shards - 1 - shard) // num_shards

        def read(numbers: Array) -> tuple[Array, Array]:
            on_shard = first + numbers
            ids = on_shard * num_shards + shard - member.row_offset
            is_row = (ids >= 0) & (ids < member.num_rows)
            values = gather_rows(rows, stack.layout.dealt(on_shard)).astype(jnp.float32)
            return vectors_of(values), jnp.where(is_row, ids, PADDING_ROW_ID)

        # Some shards have one row fewer. `read` marks the row past their end as
        # padding.
        num_rows = -(-member.num_rows // num_shards)
        # The best rows may include excluded ids, which only `_merged` removes.
        num_best = min(k + excluded.shape[1], member.num_rows)
        best = _best_of_device(queries, read, num_rows, num_best)
        if num_shards > 1:
            best = jax.tree.map(
                lambda x: jax.lax.all_to_all(x, stack.shard_axes, 0, 1, tiled=True),
                best,
            )
        return _merged(best, excluded, k)

    def run(rows: PackedRows, queries: Array, excluded: Array) -> TopK:
        room = ((0, -num_queries % plan.num_shards), (0, 0))
        queries, excluded = jnp.pad(queries, room), jnp.pad(excluded, room)
        best = on_shards(
            search_shard,
            plan,
            in_specs=(stack.rows_spec, replica_spec, device_spec),
            out_specs=device_spec,
        )(rows, queries, excluded)
        return jax.tree.map(lambda x: x[:num_queries], best)

    # On `Explicit` axes, queries can be sharded only if the device count divides the
    # query count.
    divides = num_queries % plan.num_shards == 0
    on_mesh = in_auto_axes(run, plan, device_spec if divides else PartitionSpec())
    return on_mesh(rows, queries, excluded)


_compiled_search = jax.jit(_search, static_argnames=("k", "stack", "member", "plan"))
"""Compiles once per shape, even if it is called outside of `jit`."""


def find_table(plan: EmbeddingPlan, name: str | None) -> tuple[StackPlan, TablePlan]:
    known = {table.name: (s, table) for s in plan.stacks for table in s.tables}
    if name is None and len(known) == 1:
        (name,) = known
    if name not in known:
        raise invalid("top_k: table", f"name one of the tables {sorted(known)}", name)
    stack, member = known[name]
    vocabulary = stack.vocabulary
    # Row numbers may be places in hash buckets, which mean nothing to the caller.
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
    """Raises ValueError if `k`, the queries or the vector shape don't fit.

    `vector_shape` is the shape of the vectors for one row.
    """
    if not 1 <= k <= num_rows:
        raise invalid(f"{owner}: k", f"be from 1 to {num_rows}, the number of rows", k)
    if queries.ndim != 2 or vector_shape != (1, queries.shape[-1]):
        rule = f"be [queries, dim], as wide as the vectors, {list(vector_shape)} of one"
        raise invalid(f"{owner}: queries", rule, list(queries.shape))


def checked_exclusions(excluded: Any, num_queries: int) -> Int[Array, "queries n"]:
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
    """Searches a table that each device holds as a whole."""

    def read(numbers: Array) -> tuple[Array, Array]:
        ids = jnp.where(numbers < num_rows, numbers, PADDING_ROW_ID)
        return vectors_of(ids), ids

    num_best = min(k + excluded.shape[1], num_rows)
    best = _best_of_device(queries, read, num_rows, num_best)
    return _merged(best, excluded, k)


def _best_of_device(
    queries: Float[Array, "queries query_dim"],
    read: ReadVectors,
    num_rows: int,
    num_best: int,
) -> TopK:
    """Finds the `num_best` best rows on a device, or all rows if it has fewer."""
    num_queries = queries.shape[0]
    num_best, size = min(num_best, num_rows), min(ROWS_PER_BLOCK, num_rows)

    def add_block(i: Any, best: TopK) -> TopK:
        first = jnp.asarray(i * size, jnp.int32)  # `i` is int64 in x64 mode.
        vectors, ids = read(first + jnp.arange(size, dtype=jnp.int32))
        # By default, TPUs multiply float32 in bfloat16, and the order could be wrong.
        scores = jnp.matmul(queries, vectors.T, precision=jax.lax.Precision.HIGHEST)
        # `jnp.maximum` would keep NaN.
        scores = jnp.where(scores > LOWEST_SCORE, scores, LOWEST_SCORE)
        # `top_k` would rank 0.0 above -0.0, whatever their ids.
        scores = jnp.where(scores == 0, 0.0, scores)
        scores = jnp.where((ids == PADDING_ROW_ID)[None], -jnp.inf, scores)
        scores = jnp.concatenate([best.scores, scores], axis=1)
        ids = jnp.broadcast_to(ids[None], (num_queries, size))
        ids = jnp.concatenate([best.ids, ids], axis=1)
        # `top_k` keeps the first of several equal scores. `best` comes first in the
        # arrays, because earlier blocks have lower ids.
        scores, positions = jax.lax.top_k(scores, num_best)
        return TopK(scores, jnp.take_along_axis(ids, positions, axis=1))

    shape = (num_queries, num_best)
    no_ids = jnp.full(shape, PADDING_ROW_ID, jnp.int32)
    none = TopK(jnp.full(shape, -jnp.inf, jnp.float32), no_ids)
    return jax.lax.fori_loop(0, math.ceil(num_rows / size), add_block, none)


def _merged(best: TopK, excluded: Int[Array, "queries n"], k: int) -> TopK:
    scores, ids = best
    # XLA:CPU of jax 0.11 crashes on an empty comparison.
    if excluded.shape[1]:
        is_excluded = jnp.any(ids[:, :, None] == excluded[:, None, :], axis=2)
        scores = jnp.where(is_excluded, -jnp.inf, scores)
        ids = jnp.where(is_excluded, PADDING_ROW_ID, ids)
    # `top_k` would order equal scores by device. The sort compares ids after scores,
    # and padding comes last.
    keys, ids = jax.lax.sort((-scores, ids), dimension=1, num_keys=2)
    return TopK(-keys[:, :k], ids[:, :k])
