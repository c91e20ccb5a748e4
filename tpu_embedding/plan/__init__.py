"""Everything that is fixed before a step, made once from config, mesh and hardware."""
