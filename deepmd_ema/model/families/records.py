"""The records of all families: section, builder, and writer of files of DeePMD-kit.

Builders and writers are named as text, so that reading an input imports neither torch nor them.
"""

from deepmd_ema.config.registry import Family
from deepmd_ema.model.families.dpa2.section import DPA2Config
from deepmd_ema.model.families.dpa3.section import DPA3Config
from deepmd_ema.model.families.dpa4.section import DPA4Config
from deepmd_ema.model.families.dpa4_ener.section import DPA4EnerConfig
from deepmd_ema.model.families.dpa4_model.section import DPA4ModelConfig
from deepmd_ema.model.families.dpa4c.section import DPA4CConfig
from deepmd_ema.model.families.ener.section import EnerFittingConfig
from deepmd_ema.model.families.hybrid.section import HybridConfig
from deepmd_ema.model.families.linear_ener.section import LinearConfig
from deepmd_ema.model.families.quantities.section import (
    DipoleFittingConfig,
    DosFittingConfig,
    PolarFittingConfig,
    PropertyFittingConfig,
)
from deepmd_ema.model.families.se_atten.section import SeAttenConfig, SeAttenV2Config
from deepmd_ema.model.families.se_e2_a.section import SeE2AConfig
from deepmd_ema.model.families.se_e2_r.section import SeE2RConfig
from deepmd_ema.model.families.se_e3.section import SeE3Config
from deepmd_ema.model.families.se_e3_tebd.section import SeE3TebdConfig

# sections are imported, because every input is checked against them
_FAMILIES, _TREES = "deepmd_ema.model.families", "deepmd_ema.interop.trees"

# descriptors
DPA2 = Family(DPA2Config, f"{_FAMILIES}.dpa2.module:DPA2Descriptor", f"{_TREES}.dpa2:DPA2Tree")
DPA3 = Family(DPA3Config, f"{_FAMILIES}.dpa3.module:DPA3Descriptor", f"{_TREES}.dpa3:DPA3Tree")
DPA4 = Family(DPA4Config, f"{_FAMILIES}.dpa4.module:DPA4Descriptor", f"{_TREES}.dpa4:DPA4Tree")
DPA4C = Family(
    DPA4CConfig, f"{_FAMILIES}.dpa4c.module:DPA4CDescriptor", f"{_TREES}.dpa4c:DPA4CTree"
)
HYBRID = Family(
    HybridConfig, f"{_FAMILIES}.hybrid.module:build_hybrid", f"{_TREES}.hybrid:HybridTree"
)
SE_ATTEN = Family(
    SeAttenConfig,
    f"{_FAMILIES}.se_atten.module:DPA1Descriptor",
    f"{_TREES}.type_embedded:SeAttenTree",
)
SE_ATTEN_V2 = Family(
    SeAttenV2Config,
    f"{_FAMILIES}.se_atten.module:DPA1Descriptor",
    f"{_TREES}.type_embedded:SeAttenTree",
)
SE_E2_A = Family(
    SeE2AConfig, f"{_FAMILIES}.se_e2_a.module:SeE2ADescriptor", f"{_TREES}.by_type:SeE2ATree"
)
SE_E2_R = Family(
    SeE2RConfig, f"{_FAMILIES}.se_e2_r.module:SeE2RDescriptor", f"{_TREES}.by_type:SeE2RTree"
)
SE_E3 = Family(SeE3Config, f"{_FAMILIES}.se_e3.module:SeE3Descriptor", f"{_TREES}.by_type:SeE3Tree")
SE_E3_TEBD = Family(
    SeE3TebdConfig,
    f"{_FAMILIES}.se_e3_tebd.module:SeE3TebdDescriptor",
    f"{_TREES}.type_embedded:SeE3TebdTree",
)

# fitting networks
ENER = Family(
    EnerFittingConfig, f"{_FAMILIES}.ener.module:EnergyFitting", f"{_TREES}.ener:EnerTree"
)
DPA4_ENER = Family(
    DPA4EnerConfig, f"{_FAMILIES}.dpa4_ener.module:DPA4Fitting", f"{_TREES}.ener:DPA4EnerTree"
)

# one class of networks for scalars, one for vectors and matrices that rotate with the atoms
_INVARIANT, _TENSOR = (
    f"{_FAMILIES}.quantities.module:{name}" for name in ("InvariantFitting", "TensorFitting")
)
DIPOLE = Family(DipoleFittingConfig, _TENSOR, f"{_TREES}.ener:QuantityTree")
POLAR = Family(PolarFittingConfig, _TENSOR, f"{_TREES}.ener:QuantityTree")
PROPERTY = Family(PropertyFittingConfig, _INVARIANT, f"{_TREES}.ener:QuantityTree")
DOS = Family(DosFittingConfig, _INVARIANT, f"{_TREES}.ener:QuantityTree")

# types of models
# dpa4 has no model class of its own: it is a choice of descriptor and fitting network
DPA4_MODEL = Family(
    DPA4ModelConfig, "deepmd_ema.model.build:network_parts", f"{_TREES}.dpa4_model:DPA4ModelTree"
)
LINEAR_ENER = Family(
    LinearConfig, f"{_FAMILIES}.linear_ener.module:linear_parts", f"{_TREES}.linear_ener:LinearTree"
)
