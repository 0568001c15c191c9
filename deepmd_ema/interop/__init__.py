"""Models in the files of other programs, written from ours and read into them."""
