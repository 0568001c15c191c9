"""Models: functions of parameters, buffers and a batch that return energies, forces and virials."""
