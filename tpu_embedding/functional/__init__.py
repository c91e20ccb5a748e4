"""Lookups and updates as functions of explicit arrays, without Flax.

`steps` has the functions of a training step. The arrays are a plan's stacked tables and
slot variables.
"""

from typing import TYPE_CHECKING

# Importing this module registers tables with `flax.serialization`.
from tpu_embedding.functional import flax_states as _flax_states  # noqa: F401
from tpu_embedding.functional.derived_state import (
    finalize_variable_values as finalize_variable_values,
)
from tpu_embedding.functional.derived_state import (
    with_table_values as with_table_values,
)
from tpu_embedding.functional.steps import LookupResult as LookupResult
from tpu_embedding.functional.steps import Routing as Routing
from tpu_embedding.functional.steps import activation_shapes as activation_shapes
from tpu_embedding.functional.steps import apply_gradients as apply_gradients
from tpu_embedding.functional.steps import compute_gradients as compute_gradients
from tpu_embedding.functional.steps import finite_rates as finite_rates
from tpu_embedding.functional.steps import init_slots as init_slots
from tpu_embedding.functional.steps import lookup as lookup
from tpu_embedding.functional.steps import read_rows as read_rows
from tpu_embedding.functional.steps import route as route
from tpu_embedding.lazy_names import import_when_used as _import_when_used
from tpu_embedding.tables.initial_values import init_tables as init_tables
from tpu_embedding.tables.slot_values import slot_values as slot_values
from tpu_embedding.tables.slot_values import with_slot_values as with_slot_values
from tpu_embedding.tables.table_values import unstack_tables as unstack_tables
from tpu_embedding.types import LookupStats as LookupStats
from tpu_embedding.types import RowIds as RowIds
from tpu_embedding.types import RowUpdates as RowUpdates
from tpu_embedding.update.parts import lift_to_rows as lift_to_rows

# Imported on first use, because some of these modules import this package.
if TYPE_CHECKING:
    from tpu_embedding.dynamic.ids_64 import Ids64 as Ids64
    from tpu_embedding.dynamic.ids_on_host import DynamicRows as DynamicRows
    from tpu_embedding.dynamic.ids_on_host import dynamic_rows as dynamic_rows
    from tpu_embedding.dynamic.row_ids import DynamicStats as DynamicStats
    from tpu_embedding.dynamic.row_ids import FindResult as FindResult
    from tpu_embedding.dynamic.row_ids import InsertResult as InsertResult
    from tpu_embedding.dynamic.row_ids import find_ids as find_ids
    from tpu_embedding.dynamic.row_ids import insert_ids as insert_ids
    from tpu_embedding.host_rows.functional import host_rows as host_rows
    from tpu_embedding.recommenders.best_rows import TopK as TopK
    from tpu_embedding.recommenders.best_rows import top_k as top_k
    from tpu_embedding.recommenders.unique_ids import expand as expand

__getattr__ = _import_when_used(__name__)
