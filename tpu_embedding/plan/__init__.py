"""Everything that is fixed before a step, made once from config, mesh and hardware.

`te` has the public names: `make_plan`, `device_mesh` and `EmbeddingPlan`.

* `make_plan`: makes the plan, from all files below.
* `plan`: the plan of a layer. `stack_plan`: plans of its stacks and tables.
* `features`: plans of its features. `input_plan`: the part that loaders need.
* `device_mesh`: orders devices in a mesh. `mesh_options`: mesh and hardware.
* `placing`: chooses the axes that rows are split over. `stacking`: groups tables.
* `forms`: the form of gathers and updates that suits the hardware.
* `capacity`: ids and rows per round. `replicas`: how copies of a shard add gradients.
* `memory`: bytes of packed rows. `description`: `print(plan)`.
* `shard_map`: runs functions on the devices of a plan, on a mesh of any axis type.
* `process_samples`: samples of a batch on each process.
* `check_rows`: refuses arrays of another plan.
"""
