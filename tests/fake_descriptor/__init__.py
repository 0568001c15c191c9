"""A descriptor of another distribution: two layers of messages, with options that se_e2_a does not
have.

It has neither ``sel`` nor ``neuron``: what it needs beside its section, its module and its tree
would be a fact about se_e2_a in a wrong package.
"""

from deepmd_ema.config.registry import Family
from fake_descriptor.section import FakeConfig

FAMILY = Family(
    FakeConfig,
    module="fake_descriptor.module:FakeDescriptor",
    tree="fake_descriptor.tree:FakeTree",
    example={"rcut": 4.0, "width": 6, "most": 60},
)
