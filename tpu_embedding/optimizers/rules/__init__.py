"""Optimizer rules, one algorithm or family per file. `te.optimizers` has the names.

* `sgd`, `momentum`: gradient descent; with momentum, also Nesterov's.
* `adagrad`, `bounded_adagrad`, `proximal`, `clippy`, `frequency`: Adagrad and its kin.
* `adam`, `lazy_adam`, `lion`, `yogi`, `rmsprop`: moving averages of gradients and of
  their squares.
* `ftrl`: follow the regularised leader.
* `adafactor`: second moments as one row and one column vector per table.
* `rowwise`: FBGEMM's optimizers with one value per row.
* `user_defined`: a rule that the user writes as a function of one row.
* `assign`: sets rows instead of training them.

Parts of adafactor stand in `_adafactor_state`, `_clipping` (of gradients),
`_adafactor_moments`, `_averages` (moving averages of rows) and `_sums` (compensated
sums). Rules share `_regularization` (L1 and L2).
"""
