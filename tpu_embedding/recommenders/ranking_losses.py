"""Losses for models that rank: sampled softmax, pairwise and listwise losses.

Each returns one value per list or sample, so callers can weight and average them.
`optax.losses.ranking_softmax_loss` is another listwise loss.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from tpu_embedding.argument_checks import about, invalid
from tpu_embedding.optimizers.checks import check_hyperparameters, int_from
from tpu_embedding.recommenders.metric import (
    as_integers,
    equal_ids,
    float32_in_order,
)
from tpu_embedding.recommenders.ranking_metrics import Ranks
from tpu_embedding.rows.narrow_rows import mix_bits

DIFFERENCE_OF_NO_PAIR: Final = -0.5
"""Replaces `s_j - s_i` where two items are not a pair.

Zero times an infinite derivative would be NaN. At this value, between 0 and the hinge
at -1, losses have finite derivatives."""


def in_batch_softmax(
    queries: Float[Array, "batch dim"],
    items: Float[Array, "batch dim"],
    log_probabilities: Float[Array, " batch"] | None = None,
    *,
    item_ids: Int[Array, " batch"] | None = None,
    num_hard_negatives: int | None = None,
) -> tuple[Float[Array, " batch"], Ranks]:
    """Scores each query's own item against the other items in its batch.

    The other items are the negatives. `q_j` is the probability that a sample contains
    item `j`. The scores are from equation 5 in Yi et al., "Sampling-Bias-Corrected
    Neural Modeling for Large Corpus Item Recommendations" (RecSys 2019):

        s_ij = <queries_i, items_j> - log q_j
        log_softmax_i = s_ii - log(sum over j of exp(s_ij))

    The correction `log q_j` keeps popular items, which often appear as negatives, from
    scoring too low. At the minimum of the loss, `<queries_i, items_j>` is the logarithm
    of the probability that query `i` chooses item `j`, plus a constant per query. Your
    loss is the mean of `-log_softmax`.

    Args:
      queries: global, with one query vector per sample.
      items: one item vector per sample. Items of samples with weight 0 are candidates
        like any other item.
      log_probabilities: natural logarithm of `q` for each sample's item. By default,
        all items are assumed equally frequent.
      item_ids: item id per sample. If you pass them, samples with the same item are not
        negatives of each other. By default, they are negatives, as in the paper.
      num_hard_negatives: how many negatives per query enter the softmax, at least 1.
        The negatives with the highest `s` are used, as in TensorFlow Recommenders'
        `tasks.Retrieval`. Defaults to all negatives. Ranks always count all negatives.

    Returns:
      Two values: `log_softmax`, at most 0, and `te.metrics.Ranks`. In the ranks,
      `num_higher` counts the candidates with a higher `s` than the sample's own item,
      from 0 to `batch - 1`. `num_equal` counts the candidates with the same `s`. If one
      of the sample's scores is NaN, the sample's ranks are NaN. Pass the ranks to
      `te.metrics.RecallAtK.from_ranks`.

    Raises:
      ValueError: if shapes differ, or `num_hard_negatives` is not a positive int.

    Example:
      >>> queries = jnp.array([[1.0, 0.0], [0.0, 0.0]])
      >>> items = jnp.array([[0.0, 1.0], [1.0, 0.0]])
      >>> log_softmax, ranks = in_batch_softmax(queries, items)
      >>> [round(x, 4) for x in jnp.exp(log_softmax).tolist()]
      [0.2689, 0.5]
      >>> ranks.num_higher.tolist(), ranks.num_equal.tolist()
      ([1.0, 0.0], [1.0, 2.0])
    """
    owner, queries, items = "in_batch_softmax", jnp.asarray(queries), jnp.asarray(items)
    _check_shapes(owner, "[batch, dim]", queries=queries, items=items)
    given = {"log_probabilities": log_probabilities, "item_ids": item_ids}
    _check_shapes(owner, "[batch]", samples=jnp.zeros(len(queries)), **given)
    products = queries @ items.T
    is_negative = ~jnp.eye(len(queries), dtype=bool)
    if item_ids is not None:
        ids = _where_given(item_ids)
        is_negative &= ids[:, None] != ids[None, :]
    own = _Candidates(jnp.diagonal(products), items, log_probabilities)
    others = _Candidates(products, items, log_probabilities)
    return _softmax_of_own(owner, own, others, is_negative, num_hard_negatives)


def sampled_softmax(
    queries: Float[Array, "batch dim"],
    items: Float[Array, "batch dim"],
    negatives: Float[Array, "negatives dim"],
    *,
    item_log_probabilities: Float[Array, " batch"] | None = None,
    negative_log_probabilities: Float[Array, " negatives"] | None = None,
    item_ids: Int[Array, " batch"] | None = None,
    negative_ids: Int[Array, " negatives"] | None = None,
    num_hard_negatives: int | None = None,
) -> tuple[Float[Array, " batch"], Ranks]:
    """Scores each query's item against negatives that you sampled.

    All queries share the negatives, which you look up like the items. `q` is the
    expected number of times that a batch of negatives contains an item. With the
    correction `log q`, the result estimates the softmax over all items:

        s_i = <queries_i, items_i> - log q(items_i)
        s_ij = <queries_i, negatives_j> - log q(negatives_j)
        log_softmax_i = s_i - log(exp(s_i) + sum over j of exp(s_ij))

    Your loss is the mean of `-log_softmax`. The method is from Jean et al., "On Using
    Very Large Target Vocabulary for Neural Machine Translation" (ACL 2015), as in
    `tf.nn.sampled_softmax_loss`. If you pass ids, negatives that are the query's own
    item (*accidental hits*) are excluded, as in TensorFlow by default.

    Args:
      queries: global, with one query vector per sample.
      items: vectors of the items that the samples chose.
      negatives: vectors of the sampled items.
      item_log_probabilities: natural logarithm of `q` for each sample's item.
      negative_log_probabilities: natural logarithm of `q` for each sampled item. Pass
        both logarithms, or neither if all items are sampled equally often.
      item_ids: item id per sample.
      negative_ids: id per sampled item. Pass both kinds of ids or neither.
      num_hard_negatives: see `in_batch_softmax`.

    Returns:
      `log_softmax` and ranks, as in `in_batch_softmax`. Ranks go from 0 to the number
      of negatives.

    Raises:
      ValueError: if shapes don't fit, only one array in a pair is passed, or
        `num_hard_negatives` is not a positive int.

    Example:
      >>> queries = items = jnp.ones((1, 2))
      >>> negatives = jnp.array([[1.0, 1.0], [0.0, 0.0]])
      >>> log_softmax, ranks = sampled_softmax(
      ...     queries, items, negatives, item_ids=jnp.array([7]),
      ...     negative_ids=jnp.array([7, 3]),
      ... )
      >>> round(float(jnp.exp(log_softmax[0])), 4)  # e**2 / (e**2 + 1)
      0.8808
    """
    owner = "sampled_softmax"
    queries, items, negatives = map(jnp.asarray, (queries, items, negatives))
    _check_shapes(owner, "[batch, dim]", queries=queries, items=items)
    if negatives.ndim != 2 or negatives.shape[1] != queries.shape[1]:
        rule = f"have the shape [negatives, {queries.shape[1]}], as wide as queries"
        raise invalid(f"te.nn.{owner}: negatives", rule, list(negatives.shape))
    for name, item, negative in (
        ("log_probabilities", item_log_probabilities, negative_log_probabilities),
        ("ids", item_ids, negative_ids),
    ):
        given = {"samples": jnp.zeros(len(queries)), f"item_{name}": item}
        _check_shapes(owner, "[batch]", **given)
        given = {"samples": jnp.zeros(len(negatives)), f"negative_{name}": negative}
        _check_shapes(owner, "[negatives]", **given)
        if (item is None) != (negative is None):
            missing = "item" if item is None else "negative"
            rule = f"be passed together with item_{name} and negative_{name}"
            field, fix = f"te.nn.{owner}: {missing}_{name}", "Pass both or neither."
            raise invalid(field, rule, None, fix)
    # A single matmul with all items and negatives would score batch**2 more pairs.
    own, products = jnp.einsum("bd,bd->b", queries, items), queries @ negatives.T
    is_negative = jnp.ones(products.shape, bool)
    if item_ids is not None and negative_ids is not None:
        ids = as_integers(f"te.nn.{owner}: item_ids", item_ids)
        other_ids = as_integers(f"te.nn.{owner}: negative_ids", negative_ids)
        is_negative = ~equal_ids(ids[:, None], other_ids[None, :])
    return _softmax_of_own(
        owner,
        _Candidates(own, items, item_log_probabilities),
        _Candidates(products, negatives, negative_log_probabilities),
        is_negative,
        num_hard_negatives,
    )


class _Candidates(NamedTuple):
    products: Float[Array, "*batch candidates"]
    vectors: Float[Array, "candidates dim"]
    log_probabilities: Float[Array, " candidates"] | None

    def log_q(self) -> Float[Array, " candidates"]:
        if self.log_probabilities is None:
            return jnp.zeros(len(self.vectors), self.products.dtype)
        return jnp.asarray(self.log_probabilities)


def _softmax_of_own(
    owner: str,
    own_item: _Candidates,
    others: _Candidates,
    is_negative: Bool[Array, "batch negatives"],
    num_hard_negatives: int | None,
) -> tuple[Float[Array, " batch"], Ranks]:
    if num_hard_negatives is not None:
        check = int_from(1, num_hard_negatives)
        check_hyperparameters(f"te.nn.{owner}", num_hard_negatives=check)
    own_log_q, log_q = own_item.log_q(), others.log_q()
    own, scores = own_item.products - own_log_q, others.products - log_q[None, :]
    # NaN compares as False with everything, which would rank the item first.
    is_nan = jnp.isnan(own) | jnp.any(jnp.isnan(scores) & is_negative, axis=1)
    # exp(-inf) is 0, so excluded candidates add nothing, and get no gradient.
    scores = jnp.where(is_negative, scores, -jnp.inf)
    hard = scores
    if num_hard_negatives is not None and num_hard_negatives < scores.shape[1]:
        hard, _ = jax.lax.top_k(scores, num_hard_negatives)
    all_scores = jnp.concatenate([own[:, None], hard], axis=1)
    log_softmax = own - jax.nn.logsumexp(all_scores, axis=1)

    # The rounding of a product depends on the kernel and, within a matmul, on the
    # column. So equal vectors are compared by their log q alone. Otherwise, a model
    # that has one vector for all items could rank the right item first for half of the
    # queries.
    is_same = _are_equal(own_item.vectors, others.vectors)
    left = jnp.where(is_same, own_log_q[:, None], scores)
    right = jnp.where(is_same, log_q[None, :], own[:, None])

    def count(compare: Callable[[Array, Array], Array], num_own: int) -> Array:
        is_counted = is_negative & compare(left, right)
        num_items = jnp.sum(is_counted, axis=1, dtype=jnp.float32) + num_own
        return jnp.where(is_nan, jnp.nan, num_items)

    return log_softmax, Ranks(count(jnp.greater, 0), count(jnp.equal, 1))


def _are_equal(
    vectors: Float[Array, "n dim"], others: Float[Array, "m dim"]
) -> Bool[Array, "n m"]:
    """Compares each pair of vectors. A result is wrong with probability 2^-64."""
    # Compares 64-bit hashes, because comparing elements would take `n * m * dim` steps.
    # Equal numbers have equal bits only in the same dtype.
    dtype = jnp.promote_types(vectors.dtype, others.dtype)

    def hash_words(vectors: Array) -> tuple[Array, Array]:
        vectors = jax.lax.stop_gradient(vectors).astype(dtype)
        # -0.0 equals 0.0, but has different bits.
        vectors = jnp.where(vectors == 0, jnp.zeros_like(vectors), vectors)
        bits = vectors.view(f"uint{min(8 * dtype.itemsize, 32)}").astype(jnp.uint32)
        positions = np.arange(1, bits.shape[1] + 1, dtype=np.uint32)
        # Sums ignore the order, so each element is mixed with its position.
        words = mix_bits(bits ^ mix_bits(positions)[None, :])
        more_words = mix_bits(words + jnp.uint32(1))
        # Unlike sums of floats, sums of integers are exact in any order.
        first, second = (
            jnp.sum(x, axis=1, dtype=jnp.uint32) for x in (words, more_words)
        )
        return first, second

    pairs = zip(hash_words(vectors), hash_words(others), strict=True)
    first, second = (x[:, None] == y[None, :] for x, y in pairs)
    return first & second


def pairwise_loss(
    scores: Float[Array, "*lists items"],
    labels: Float[Array, "*lists items"],
    of_difference: Callable[[Array], Array] = jax.nn.softplus,
    *,
    where: Bool[Array, "*lists items"] | None = None,
) -> Float[Array, "*lists"]:
    """Sums `of_difference(s_j - s_i)` over the pairs with `y_i > y_j`.

    The default is the logistic loss `log(1 + exp(s_j - s_i))` from RankNet. It equals
    the BPR loss if one item in each pair was chosen. See Burges et al., "Learning to
    Rank using Gradient Descent" (ICML 2005). You can also pass other losses, for
    example:

    * hinge: `lambda d: jax.nn.relu(1 + d)`; see Joachims, "Optimizing Search Engines
      using Clickthrough Data" (KDD 2002);
    * soft zero-one: `jax.nn.sigmoid`.

    TensorFlow Ranking and Keras Recommenders form the same pairs. To average, Keras
    Recommenders divides the sum by the item count.

    Args:
      scores: item scores `s`, optionally divided by a temperature.
      labels: item relevances `y`, in the same shape.
      of_difference: elementwise loss for a pair. Its derivative must be finite at -0.5.
      where: False for padding. By default, nothing is padding.

    Returns:
      One loss per list, 0 if all labels are equal.

    Raises:
      ValueError: if shapes differ.

    Example:
      >>> scores, labels = jnp.array([2.0, 0.5, 1.0]), jnp.array([1, 0, 2])
      >>> float(pairwise_loss(scores, labels, lambda d: jax.nn.relu(1 + d)))
      2.5
    """
    given = {"scores": scores, "labels": labels, "where": where}
    _check_shapes("pairwise_loss", "[..., items]", **given)
    scores, relevance = jnp.asarray(scores), _where_given(labels)
    is_pair = relevance[..., :, None] > relevance[..., None, :]
    if where is not None:
        where = jnp.asarray(where)
        is_pair &= where[..., :, None] & where[..., None, :]
    differences = scores[..., None, :] - scores[..., :, None]
    # Both `jnp.where` calls are needed: the first keeps NaN out of the derivative, and
    # the second leaves items that are not pairs out of the sum.
    differences = jnp.where(is_pair, differences, DIFFERENCE_OF_NO_PAIR)
    losses = of_difference(differences)
    return jnp.sum(jnp.where(is_pair, losses, 0.0), axis=(-2, -1))


def list_mle_loss(
    scores: Float[Array, "*lists items"],
    labels: Float[Array, "*lists items"],
    *,
    where: Bool[Array, "*lists items"] | None = None,
) -> Float[Array, "*lists"]:
    """Computes the negative log-likelihood of the label order, a listwise loss.

    In the Plackett-Luce model, items are drawn one by one, each from a softmax over the
    remaining scores:

        loss = sum over i of log(sum over j >= i of exp(s_j)) - s_i

    Items are numbered by descending label. Equal labels keep their order, as in Keras
    Recommenders. Labels are compared with all their bits, but JAX truncates 64-bit
    arguments of jitted functions. See Xia et al., "Listwise Approach to Learning to
    Rank" (ICML 2008). Arguments and errors are the same as for `pairwise_loss`.

    Returns:
      One loss per list, at least 0. Lists with at most one item have loss 0.

    Example:
      >>> loss = list_mle_loss(jnp.array([1.0, 1.0, 1.0]), jnp.array([0, 2, 1]))
      >>> round(float(loss), 4)  # log(3) + log(2)
      1.7918
    """
    given = {"scores": scores, "labels": labels, "where": where}
    _check_shapes("list_mle_loss", "[..., items]", **given)
    scores, labels = jnp.asarray(scores), float32_in_order(labels)
    where = jnp.ones(scores.shape, bool) if where is None else jnp.asarray(where)
    # Padding sorts last, and adds exp(-3e38), which is 0. The stable sort keeps equal
    # labels in order.
    keys = jnp.where(where, -labels, jnp.inf)
    falling = jnp.argsort(keys, axis=-1, stable=True)
    where = jnp.take_along_axis(where, falling, axis=-1)
    scores = jnp.take_along_axis(scores, falling, axis=-1)
    scores = jnp.where(where, scores, jnp.finfo(scores.dtype).min)
    axis = scores.ndim - 1
    totals = jax.lax.cumlogsumexp(scores, axis=axis, reverse=True)
    return jnp.sum(jnp.where(where, totals - scores, 0.0), axis=-1)


def _where_given(values: Any) -> Array | np.ndarray:
    # Host values stay on the host, because JAX would truncate 64-bit values.
    return values if isinstance(values, jax.Array) else np.asarray(values)


def _check_shapes(owner: str, axes: str, **arrays: Any) -> None:
    shapes = {name: np.shape(x) for name, x in arrays.items() if x is not None}
    first, *others = shapes.values()
    num_axes = axes.count(",") + 1
    is_right = first != () if "..." in axes else len(first) == num_axes
    if not is_right or any(shape != first for shape in others):
        given = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        text = f"te.nn.{owner}: all must have one shape {axes}, got {given}."
        raise about(ValueError(text), f"te.nn.{owner}: shapes", list(shapes.values()))
