"""The descriptors se_atten (DPA-1) and se_atten_v2."""
