"""Operations of descriptors: a reference in plain torch, and what is faster in eager mode on a
CPU.
"""
