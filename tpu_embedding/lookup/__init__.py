"""The traced stages of a lookup, forward and backward. None of it runs on the host.

All modules are private. `functional/steps.py` calls them inside `shard_map`, with
arguments that `inputs/` prepared. The stages:

    ids ─ flatten ─ dedup ═ exchange of ids ═ gather ═ exchange of rows ═ combine ─
        activations
    cotangents ─ spread ═ exchange of gradients ═ merge ─ gradient of each row

1. flatten, in `_forward`: ids of all features of a stack become keys, which include
   the owner of each row.
2. dedup, in `_rounds`: equal keys become one request; requests are grouped by owner.
3. rounds, in `_rounds`: each request gets a round and a position in the round's buffer.
4. exchange, in `_rounds`: all-to-all of ids, of rows, and of gradients. Owners gather
   rows.
5. combine, in `_forward`: rows are summed into samples.
6. spread, in `_backward`: each row sums the cotangents of the samples that use it.
7. merge, in `_backward`: the owner sums the gradients that devices send for one row.

`_forward` runs stages 1 to 5. `_backward` runs stages 6, 4 and 7, round by round: an
update folds over `gradient_rounds`. Where one CPU device owns all rows, blocks of ids
replace stages 3, 4, 6 and 7.

A gradient holds the routing of the lookup, the cotangents, and what the owners received
in round 1. The size of a gradient doesn't depend on the table. Gradients are added by
joining their samples. An update or a norm folds over the rounds. Each row's whole
gradient arrives in one round, so rules that square gradients stay exact.
"""
