"""Optimizer rules, one algorithm or family per file. `te.optimizers` has the names.

* `sgd`: gradient descent, also with momentum; Lion; assignment of rows.
* `adagrad`: Adagrad per element or row, bounded, proximal, Clippy, and by frequency.
* `adam`: Adam, Yogi, RMSProp and Adadelta. `lazy_adam`: Adam that can catch up.
* `ftrl`: follow the regularised leader.
* `adafactor`: second moments as one row and one column vector per table.
* `rowwise`: FBGEMM's optimizers with one value per row.
* `user_defined`: a rule that the user writes as a function of one row.

`_clipping` has clipping of gradients as in Keras, and L1 and L2 regularisation.
"""
