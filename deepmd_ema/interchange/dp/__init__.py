"""DeePMD-kit's model files, ``.dp`` (HDF5) and ``.yaml``."""
