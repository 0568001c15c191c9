"""Operations of descriptors: a reference in plain torch, and faster ones for eager mode."""
