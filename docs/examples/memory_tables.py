"""Trains a small transformer whose layers read two tables of hashed n-grams.

Command: python docs/examples/memory_tables.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import tpu_embedding as te

NUM_TOKENS, LENGTH, WIDTH, NUM_LAYERS = 32, 32, 32, 3


def hashed(tokens, n, num_rows):
    """Returns a row for the last n tokens of each place, by a hash."""
    keys = jnp.full(tokens.shape, n, jnp.uint32)
    for distance in range(n):
        earlier = jnp.pad(tokens, ((0, 0), (distance, 0)))[:, : tokens.shape[1]]
        keys = (keys ^ earlier.astype(jnp.uint32)) * jnp.uint32(0x9E3779B1)
        keys = keys ^ (keys >> 15)
    return (keys % jnp.uint32(num_rows)).astype(jnp.int32)


class Block(nnx.Module):
    def __init__(self, width, memory_width, rngs):
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(3)])
        self.attention = nnx.MultiHeadAttention(
            num_heads=4, in_features=width, decode=False, rngs=rngs
        )
        self.gate = nnx.Linear(width, width, rngs=rngs)
        self.memory = nnx.Linear(memory_width, width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x, rows):
        mask = nnx.make_causal_mask(x[:, :, 0])
        x = x + self.attention(self.norms[0](x), mask=mask)
        x = x + nnx.sigmoid(self.gate(self.norms[1](x))) * self.memory(rows)
        return x + self.down(nnx.gelu(self.up(self.norms[2](x))))


class LanguageModel(nnx.Module):
    def __init__(
        self, num_rows, rngs, *, width=WIDTH, dim=16, num_tokens=NUM_TOKENS, mesh=None
    ):
        self.num_rows = num_rows
        tables = [
            te.TableConfig(vocabulary_size=num_rows, dim=dim, name=f"{n}-grams")
            for n in (2, 3)
        ]
        features = [
            te.FeatureConfig(table=table, max_sequence_length=LENGTH)
            for table in tables
        ]
        rule = te.optimizers.rowwise_adagrad(1.0)
        self.tables = te.TPUEmbedding(features, rule, mesh=mesh, rngs=rngs)
        self.tokens = nnx.Embed(num_tokens, width, rngs=rngs)

        @nnx.split_rngs(splits=NUM_LAYERS)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make_blocks(rngs):
            return Block(width, 2 * dim, rngs)

        self.blocks = make_blocks(rngs)

    def __call__(self, tokens):
        @nnx.scan(in_axes=(nnx.Carry, 0, None), out_axes=nnx.Carry)
        @nnx.remat
        def run(x, block, rows):
            return block(x, rows)

        # One lookup before the scan serves all layers.
        rows = self.tables([hashed(tokens, n, self.num_rows) for n in (2, 3)])
        x = run(self.tokens(tokens), self.blocks, jnp.concatenate(rows, axis=2))
        return self.tokens.attend(x)


def loss_fn(model, tokens):
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@nnx.jit(donate_argnums=(0, 1))
def train_step(model, optimizer, tokens):
    loss, gradients = te.value_and_grad(loss_fn)(model, tokens)
    optimizer.update(model, gradients)
    return loss


def text(batch_size, random):
    """Returns tokens; nine of ten follow from the two before them."""
    tokens = random.integers(0, NUM_TOKENS, (batch_size, LENGTH + 1), dtype=np.int32)
    is_free = random.random(tokens.shape) < 0.1
    for i in range(2, LENGTH + 1):
        follower = (tokens[:, i - 2] * 7 + tokens[:, i - 1] ** 2 * 3 + 11) % NUM_TOKENS
        tokens[:, i] = np.where(is_free[:, i], tokens[:, i], follower)
    return tokens


if __name__ == "__main__":
    model = LanguageModel(100_000, nnx.Rngs(0))
    optimizer = te.Optimizer(model, optax.adam(1e-2))
    random = np.random.default_rng(0)
    losses = [float(train_step(model, optimizer, text(64, random))) for _ in range(60)]
    print(f"loss on {jax.device_count()} devices: {losses[0]:.3f} at first,", end=" ")
    print(f"{np.mean(losses[-5:]):.3f} after {len(losses)} steps")
