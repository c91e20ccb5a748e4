"""TorchScript: one EmbeddingBag per feature, scripted and frozen."""

from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from settings import ServingSetting, initial_table, int8_codes


class Lookups(torch.nn.Module):
    """One bag of rows per feature and sample."""

    def __init__(self, bags: list[Any]):
        super().__init__()
        self.bags = torch.nn.ModuleList(bags)

    def forward(self, ids: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the sum of each sample's rows, by feature."""
        results: list[torch.Tensor] = []
        for i, bag in enumerate(self.bags):
            results.append(bag(ids[i]))
        return results


class Side:
    """A server of the scripted module."""

    def __init__(self, setting: ServingSetting):
        self.versions = {"torch": str(torch.__version__)}
        self._setting = setting
        make = _int8_bag if setting.dtype == "int8" else _float32_bag
        bags = [make(initial_table(setting, i)) for i in range(setting.tables)]
        self._module = torch.jit.freeze(torch.jit.script(Lookups(bags).eval()))

    def load(self, ids: np.ndarray) -> Any:
        """Returns a request; a bag takes ids as `[batch, valence]`."""
        by_feature = self._setting.by_feature(ids).values()
        return [each.reshape(-1, self._setting.valence) for each in by_feature]

    def forward(self, batch: Any) -> list[np.ndarray]:
        """Serves a request; returns NumPy arrays."""
        with torch.inference_mode():
            rows = self._module([torch.from_numpy(ids) for ids in batch])
        return [each.numpy() for each in rows]

    def activations(self, batch: Any) -> np.ndarray:
        """Returns the result of a lookup."""
        return np.stack(self.forward(batch), axis=1)


def _float32_bag(table: np.ndarray) -> Any:
    rows = torch.from_numpy(table)
    return torch.nn.EmbeddingBag.from_pretrained(rows, mode="sum")


def _int8_bag(table: np.ndarray) -> Any:
    """Returns a bag of the same bytes, scales and biases as an export's."""
    codes, scales, biases = int8_codes(table)
    bag = torch.ao.nn.quantized.EmbeddingBag(*table.shape, mode="sum")
    bag.set_weight(
        torch._make_per_channel_quantized_tensor(
            torch.from_numpy(codes),
            torch.from_numpy(scales),
            torch.from_numpy(-biases / scales),
            0,
        )
    )
    return bag
