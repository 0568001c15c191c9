"""The fitting networks dipole, polar, property and dos."""

from deepmd_ema.config.registry import Family
from deepmd_ema.model.families.quantities.section import (
    DipoleFittingConfig,
    DosFittingConfig,
    PolarFittingConfig,
    PropertyFittingConfig,
)

# one class of networks for scalars, one for vectors and matrices that rotate with the atoms
_INVARIANT = f"{__name__}.module:InvariantFitting"
_TENSOR = f"{__name__}.module:TensorFitting"
_TREE = "deepmd_ema.interop.trees.ener:QuantityTree"
DIPOLE = Family(DipoleFittingConfig, _TENSOR, _TREE)
POLAR = Family(PolarFittingConfig, _TENSOR, _TREE)
PROPERTY = Family(PropertyFittingConfig, _INVARIANT, _TREE)
DOS = Family(DosFittingConfig, _INVARIANT, _TREE)
