"""Physics of a model beside its errors: dynamics, bond scans, smoothness at the cutoff, properties of crystals."""
