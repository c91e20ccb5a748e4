"""Everything that is fixed before a step, made once from config, mesh and hardware.

`te` has the public names: `make_plan`, `device_mesh` and `EmbeddingPlan`.

* `make_plan`: names, places and stacks tables, and makes the plan.
* `plan`: the plan of a layer, and of its stacks and tables.
* `features`: plans of its features, and the part that loader processes need.
* `mesh_options`: mesh and hardware.
* `backend`: the seam of backends, which look rows up and update them.
* `capacity`: ids and rows per round, and the form of gathers and updates.
* `memory`: bytes of packed rows, as numbers and as text.
* `shard_map`: runs functions on the devices of a plan, on a mesh of any axis type.
* `check_rows`: rejects arrays of another plan.
"""
