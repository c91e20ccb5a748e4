"""Everything that is fixed before a step, made from config, mesh and hardware.

Its public names are in `te`: `make_plan`, `device_mesh` and `EmbeddingPlan`.

* `make_plan`: names, places and stacks tables, and makes the plan.
* `plan`: plans of a layer, its stacks and its tables.
* `features`: plans of the features, and the part of a plan that loader processes need.
* `mesh_options`: mesh and hardware.
* `backend`: the interface of backends, which look up and update rows.
* `capacity`: size of a round, and the form of gathers and updates.
* `memory`: computes the bytes of packed rows, and formats them as text.
* `report`: the text of `print(plan)`.
* `shard_map`: runs functions on the devices of a plan, on a mesh of any axis type.
* `check_rows`: rejects arrays made for another plan.
"""
