"""Prints modules of this package in a few lines, inside of a user's model, too."""

from collections.abc import Iterator, Mapping
from typing import Any

from flax import nnx
from flax.nnx import reprlib
from flax.nnx.visualization import render_object_constructor


class ShortRepr(nnx.Module):
    """A module that prints facts about its tables in place of all its variables.

    Flax prints every attribute of a module: a plan alone has a kilobyte per feature.
    """

    def _repr_facts(self) -> Mapping[str, Any]:
        """Returns what `print` and `nnx.display` show, by name."""
        raise NotImplementedError

    def __nnx_repr__(self) -> Iterator[Any]:
        all_parts = super().__nnx_repr__()
        yield next(all_parts)  # the type, and the sizes of the variables
        all_parts.close()
        for name, fact in self._repr_facts().items():
            yield reprlib.Attr(name, fact, use_raw_value=isinstance(fact, str))

    def __treescope_repr__(self, path: Any, subtree_renderer: Any) -> Any:
        return render_object_constructor(
            object_type=type(self),
            attributes=self._repr_facts(),
            path=path,
            subtree_renderer=subtree_renderer,
        )
