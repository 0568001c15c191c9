"""Operations written for eager mode on a CPU, with gradients written out."""
