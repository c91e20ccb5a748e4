"""Retrieval metrics, for samples that rank candidates.

Candidates with equal scores can be ranked in any order. `RecallAtK` and `NDCGAtK`
average over all possible orders, like scikit-learn's `ndcg_score`. So a model that
gives all candidates the same score gets the value of a random order, not of a perfect
one.
"""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float

from tpu_embedding.argument_checks import invalid
from tpu_embedding.recommenders.click_metrics import Mean
from tpu_embedding.recommenders.metric import (
    as_integers,
    check_batch,
    equal_ids,
    float32_in_order,
)
from tpu_embedding.types import PADDING_ROW_ID


class Ranks(NamedTuple):
    """The possible ranks of one relevant candidate per sample.

    If scores are equal, several ranks are possible and equally likely. There are
    `num_equal` possible ranks, and the first is `num_higher`.

    Attributes:
      num_higher: how many candidates have a higher score, in any shape. NaN if a score
        is NaN.
      num_equal: how many candidates have the relevant candidate's score, including
        itself; shaped like `num_higher`.

    Example:
      >>> ranks = Ranks(jnp.array([0.0, 1.0]), num_equal=jnp.array([2.0, 1.0]))
      >>> float(RecallAtK.from_ranks(ranks, k=1).compute())  # the mean of 1/2 and 0
      0.25
    """

    num_higher: Float[Array, "..."]
    num_equal: Float[Array, "..."]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _TopK(Mean):
    """A weighted mean of sample values, which depend on the best `k` candidates.

    Samples without a relevant candidate are ignored. If no weight remains, the metric
    is not defined.
    """

    k: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def from_batch(
        cls,
        scores: ArrayLike,
        labels: ArrayLike,
        weights: ArrayLike | None = None,
        *,
        is_candidate: ArrayLike | None = None,
        k: int,
    ) -> Self:
        """Makes the metric from one batch.

        Args:
          scores: `[batch, candidates]`. Higher scores rank first. Only their order
            matters. On the host, 64-bit numbers are not rounded.
          labels: `[batch, candidates]`, candidate relevances; 0 is irrelevant.
          weights: at least 0, or bool, `[batch]`. Defaults to 1.
          is_candidate: bool `[batch, candidates]`, False for padding. Defaults to True.
          k: at least 1. If it exceeds the candidate count, all candidates count.

        Raises:
          ValueError: if shapes differ, or `k` is below 1.
        """
        cls._check(k)
        # A cast to float32 would make different 64-bit scores equal.
        scores = float32_in_order(scores)
        scores, labels, is_candidate = check_batch(
            cls.__name__, scores=scores, labels=labels, is_candidate=is_candidate
        )
        if scores.ndim != 2:
            rule = "have the shape [batch, candidates]"
            raise invalid(f"{cls.__name__}: scores", rule, list(scores.shape))
        batch = jnp.zeros(scores.shape[0])
        _, weights = check_batch(cls.__name__, batch=batch, weights=weights)
        is_candidate = is_candidate != 0
        labels = jnp.where(is_candidate, labels, 0.0)
        values = cls._values(scores, labels, is_candidate, k)
        # A NaN score would otherwise rank last, and a broken model would get a value.
        is_nan = jnp.any(jnp.isnan(scores) & is_candidate, axis=1)
        values = jnp.where(is_nan, jnp.nan, values)
        # Samples without relevant candidates have the value 0 / 0, but get weight 0, so
        # they are ignored.
        is_used = jnp.any(labels != 0, axis=1)
        return cls._of(values, jnp.where(is_used, weights, 0.0), k=k)

    @classmethod
    def from_ranks(
        cls, ranks: ArrayLike | Ranks, weights: ArrayLike | None = None, *, k: int
    ) -> Self:
        """Makes the metric for samples with one relevant candidate each.

        Args:
          ranks: how many candidates rank before the relevant one, in any shape. If
            scores can be equal, pass `Ranks`, as `te.nn.in_batch_softmax` returns them.
          weights: at least 0, or bool, shaped like `ranks`. Defaults to 1.
          k: at least 1.

        Raises:
          ValueError: if shapes differ, or `k` is below 1.

        Example:
          >>> ranks = Ranks(num_higher=jnp.array([0.0]), num_equal=jnp.array([64.0]))
          >>> float(RecallAtK.from_ranks(ranks, k=1).compute())  # 1 / 64
          0.015625
        """
        cls._check(k)
        if isinstance(ranks, Ranks):
            ranks, num_equal, weights = check_batch(
                cls.__name__, **ranks._asdict(), weights=weights
            )
            values = cls._sum_of_gains(ranks, ranks + num_equal, k) / num_equal
        else:
            ranks, weights = check_batch(cls.__name__, ranks=ranks, weights=weights)
            values = jnp.where(ranks < k, cls._gains(ranks), 0.0)
        values = jnp.where(jnp.isnan(ranks), jnp.nan, values)
        return cls._of(values, weights, k=k)

    @classmethod
    def from_top_k(
        cls,
        ids: ArrayLike,
        labels: ArrayLike,
        weights: ArrayLike | None = None,
        *,
        k: int,
    ) -> Self:
        """Makes the metric for retrieved ids, such as from `te.nn.top_k`.

        A sample whose label was not retrieved has the value 0. The label
        `te.inputs.PADDING_ROW_ID`, which pads `ids`, is never found.

        Args:
          ids: integers `[batch, n]`, candidates per sample, best first.
          labels: integers `[batch]`, the relevant id per sample. Host arrays are
            compared with all 64 bits.
          weights: at least 0, or bool, `[batch]`. Defaults to 1.
          k: from 1 to `n`.

        Raises:
          ValueError: if shapes don't fit, ids or labels are not integers, or `k` is out
            of range.

        Example:
          >>> ids = [[3, 5], [1, 4], [2, 0]]  # te.nn.top_k(layer, queries, k=2).ids
          >>> recall = RecallAtK.from_top_k(ids, [5, 7, 9], k=2)
          >>> round(float(recall.compute()), 4)
          0.3333
        """
        ids = as_integers(f"{cls.__name__}: ids", ids)
        labels = as_integers(f"{cls.__name__}: labels", labels)
        if ids.ndim != 2 or labels.shape != ids.shape[:1] or k > ids.shape[1]:
            rule = f"have the shape [batch, n], n at least k={k}, and labels [batch]"
            shapes = [ids.shape, labels.shape]
            raise invalid(f"{cls.__name__}: ids", rule, shapes)
        is_wanted = equal_ids(ids, labels[:, None])
        is_wanted &= ~equal_ids(labels, np.array([PADDING_ROW_ID]))[:, None]
        # Without a match, argmax is 0, which would be the best rank.
        ranks = jnp.argmax(is_wanted, axis=1).astype(jnp.float32)
        ranks = jnp.where(jnp.any(is_wanted, axis=1), ranks, jnp.inf)
        return cls.from_ranks(ranks, weights, k=k)

    @classmethod
    def _gains(cls, ranks: Any, xp: Any = jnp) -> Any:
        """Maps ranks, which start at 0, to gains. `xp` is `numpy` or `jax.numpy`."""
        raise NotImplementedError

    @classmethod
    def _values(
        cls,
        scores: Float[Array, "batch candidates"],
        labels: Float[Array, "batch candidates"],
        is_candidate: Bool[Array, "batch candidates"],
        k: int,
    ) -> Float[Array, " batch"]:
        raise NotImplementedError

    @classmethod
    def _total_gains(
        cls,
        scores: Float[Array, "batch candidates"],
        labels: Float[Array, "batch candidates"],
        is_candidate: Bool[Array, "batch candidates"],
        k: int,
    ) -> Float[Array, " batch"]:
        # NaN and padding sort after all scores.
        keys = jnp.where(is_candidate, -scores, jnp.nan)
        starts, ends = (
            jax.vmap(functools.partial(jnp.searchsorted, side=side))(
                jnp.sort(keys, axis=1), keys
            )
            for side in ("left", "right")
        )
        # Equal scores share the ranks from `starts` to `ends`, so each gets the mean
        # gain of these ranks.
        gains = cls._sum_of_gains(starts, ends, min(k, scores.shape[1]))
        return jnp.sum(labels * gains / (ends - starts).astype(jnp.float32), axis=1)

    @classmethod
    def _sum_of_gains(
        cls, starts: Array, ends: Array, k: int
    ) -> Float[Array, "*shape"]:
        """Sums the gains for ranks in `[starts, ends)` and below `k`."""
        # Use float64 on the host, because differences of float32 totals are inexact.
        totals = np.cumsum(cls._gains(np.arange(k), np), dtype=np.float64)
        totals = np.concatenate([[0.0], totals])
        high = totals.astype(np.float32)
        low = (totals - high).astype(np.float32)
        starts, ends = (jnp.clip(x, 0, k).astype(jnp.int32) for x in (starts, ends))
        high, low = jnp.asarray(high), jnp.asarray(low)
        return (high[ends] - high[starts]) + (low[ends] - low[starts])

    @classmethod
    def _check(cls, k: int) -> None:
        if k < 1:
            raise invalid(f"{cls.__name__}.k", "be at least 1", k)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RecallAtK(_TopK):
    """The share of relevant candidates among the best `k`, averaged over samples.

    With one relevant candidate per sample, it is the hit rate. Samples without a
    relevant candidate are ignored. If you have retrieved ids, use `from_top_k`.

    Example:
      >>> recall = RecallAtK.from_batch([[3.0, 2.0, 1.0]], [[1, 0, 1]], k=2)
      >>> float(recall.compute())
      0.5
    """

    @classmethod
    def _gains(cls, ranks, xp=jnp):
        return xp.ones_like(ranks)

    @classmethod
    def _values(cls, scores, labels, is_candidate, k):
        is_relevant = (labels != 0).astype(jnp.float32)
        num_found = cls._total_gains(scores, is_relevant, is_candidate, k)
        return num_found / jnp.sum(is_relevant, axis=1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class NDCGAtK(_TopK):
    """The normalized discounted cumulative gain at `k`, averaged over samples.

    A candidate at rank `r`, counted from 0, gains `label / log2(r + 2)`. The sum of
    gains is divided by the sum for the best order. See Järvelin and Kekäläinen,
    "Cumulated Gain-Based Evaluation of IR Techniques" (2002). With exponential gains,
    `2**label - 1` replaces the label, as in TensorFlow Ranking and Keras Recommenders.
    Samples without a relevant candidate are ignored.

    Attributes:
      gains: `"linear"` or `"exponential"`; an option of `from_batch`.

    Example:
      >>> ndcg = NDCGAtK.from_batch([[3.0, 2.0, 1.0]], [[0, 0, 1]], k=3)
      >>> float(ndcg.compute())
      0.5
    """

    gains: Literal["linear", "exponential"] = dataclasses.field(
        default="linear", metadata={"static": True}
    )

    @classmethod
    def from_batch(
        cls,
        scores: ArrayLike,
        labels: ArrayLike,
        weights: ArrayLike | None = None,
        *,
        gains: Literal["linear", "exponential"] = "linear",
        **options: Any,
    ) -> Self:
        """Makes the metric from one batch.

        Args:
          scores: `[batch, candidates]`. Higher scores rank first.
          labels: `[batch, candidates]`, candidate relevances; 0 is irrelevant.
          weights: at least 0, or bool, `[batch]`. Defaults to 1.
          gains: `"linear"`, or `"exponential"` for `2**label - 1`.
          **options: `k` and `is_candidate`; see `RecallAtK.from_batch`.

        Raises:
          ValueError: if shapes differ, `k` is below 1, or `gains` is unknown.
        """
        if gains not in ("linear", "exponential"):
            rule = "be 'linear' or 'exponential'"
            raise invalid(f"{cls.__name__}.gains", rule, gains)
        if gains == "exponential":
            labels = jnp.exp2(jnp.asarray(labels, jnp.float32)) - 1
        metric = super().from_batch(scores, labels, weights, **options)
        return dataclasses.replace(metric, gains=gains)

    @classmethod
    def _gains(cls, ranks, xp=jnp):
        return 1 / xp.log2(ranks + 2)

    @classmethod
    def _values(cls, scores, labels, is_candidate, k):
        gains = cls._total_gains(scores, labels, is_candidate, k)
        # If the labels are the scores, the order is the best possible.
        return gains / cls._total_gains(labels, labels, is_candidate, k)
