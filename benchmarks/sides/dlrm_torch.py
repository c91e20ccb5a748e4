"""The same DLRM in PyTorch: an EmbeddingBag with sparse gradients per feature."""

from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from settings import INITIAL_DLRM_ACCUMULATOR, LAST_RATE, DlrmSetting


class Side:
    """Sparse Adagrad for the tables, Adam for the rest."""

    def __init__(self, setting: DlrmSetting):
        self.versions = {"torch": str(torch.__version__)}
        parameters = dict(np.load(setting.parameters_file))
        self._model = _DLRM(parameters)
        self._loss = torch.nn.BCEWithLogitsLoss()
        tables = [bag.weight for bag in self._model.bags]
        dense = [*self._model.bottom.parameters(), *self._model.top.parameters()]
        self._optimizers = [
            torch.optim.Adagrad(
                tables,
                lr=setting.table_learning_rate,
                initial_accumulator_value=INITIAL_DLRM_ACCUMULATOR,
            ),
            torch.optim.Adam(dense, lr=setting.dense_learning_rate),
        ]
        self._schedules = [
            torch.optim.lr_scheduler.LinearLR(
                optimizer, 1.0, LAST_RATE, total_iters=setting.num_steps
            )
            for optimizer in self._optimizers
        ]

    def load(self, batch: dict[str, np.ndarray]) -> Any:
        """Returns the batch as it is: conversion is part of the work."""
        return batch

    def train(self, *batches: dict[str, np.ndarray]) -> None:
        """Runs a step on each batch."""
        for batch in batches:
            tensors = _to_tensors(batch)
            logits = self._model(tensors["ids"], tensors["dense"])
            for optimizer in self._optimizers:
                optimizer.zero_grad(set_to_none=True)
            self._loss(logits, tensors["labels"]).backward()
            for optimizer, schedule in zip(
                self._optimizers, self._schedules, strict=True
            ):
                optimizer.step()
                schedule.step()

    def activations(self, batch: dict[str, np.ndarray]) -> np.ndarray:
        """Returns the logits."""
        tensors = _to_tensors(batch)
        with torch.no_grad():
            return self._model(tensors["ids"], tensors["dense"]).numpy()


class _DLRM(torch.nn.Module):
    """`logit = top([bottom(dense), products of each pair of vectors])`."""

    def __init__(self, parameters: dict[str, np.ndarray]):
        super().__init__()
        tables = [parameters[n] for n in sorted(parameters) if n.startswith("table.")]
        self.bags = torch.nn.ModuleList(
            torch.nn.EmbeddingBag(
                *table.shape, mode="sum", sparse=True, _weight=torch.tensor(table)
            )
            for table in tables
        )
        self.bottom = _mlp(parameters, "bottom", last_activation=True)
        self.top = _mlp(parameters, "top", last_activation=False)
        num_vectors = 1 + len(tables)
        self._pairs = torch.tril_indices(num_vectors, num_vectors, offset=-1)

    def forward(self, ids: Any, dense: Any) -> Any:
        """Returns the logits, `[batch]`."""
        bottom = self.bottom(dense)
        rows = [bag(i[:, None]) for bag, i in zip(self.bags, ids, strict=True)]
        vectors = torch.stack([bottom, *rows], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        products = products[:, self._pairs[0], self._pairs[1]]
        return self.top(torch.cat([bottom, products], dim=1))[:, 0]


def _mlp(parameters: dict[str, np.ndarray], name: str, *, last_activation: bool) -> Any:
    kernels = sorted(k for k in parameters if k.startswith(f"{name}.") and "ker" in k)
    layers: list[Any] = []
    for kernel_name in kernels:
        kernel = parameters[kernel_name]
        linear = torch.nn.Linear(*kernel.shape)
        with torch.no_grad():
            linear.weight.copy_(torch.tensor(kernel.T))
            bias = parameters[kernel_name.replace("kernel", "bias")]
            linear.bias.copy_(torch.tensor(bias))
        layers += [linear, torch.nn.ReLU()]
    return torch.nn.Sequential(*(layers if last_activation else layers[:-1]))


def _to_tensors(batch: dict[str, np.ndarray]) -> dict[str, Any]:
    return {name: torch.from_numpy(array) for name, array in batch.items()}
