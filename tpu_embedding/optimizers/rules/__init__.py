"""Optimizer rules, one algorithm or family per file. `te.optimizers` exports them.

* `sgd`: gradient descent with or without momentum, Lion, and assignment of rows.
* `adagrad`: Adagrad per element or per row, and its bounded, proximal, Clippy and
  frequency-aware variants.
* `adam`: Adam, Yogi, RMSProp and Adadelta. `lazy_adam`: Adam that can catch up.
* `ftrl`: follow the regularised leader.
* `adafactor`: second moments as one row vector and one column vector per table.
* `rowwise`: FBGEMM's optimizers with one value per row.
* `user_defined`: a rule that the user writes as a function of one row.

`_proximal` has L1 and L2 regularisation, and the rows that FTRL recomputes.
"""
