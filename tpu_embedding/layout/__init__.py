"""From config, mesh and hardware to the plan: stacking, placement, packing, memory."""
