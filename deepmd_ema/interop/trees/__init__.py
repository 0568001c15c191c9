"""Writers and readers of the trees of each family, in the format of DeePMD-kit."""
