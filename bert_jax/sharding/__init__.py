"""How arrays are sharded over devices: the mesh, rules for parameters, and collectives."""
