"""`bench codec`: kernels against a plain copy. Start reading at `verb`."""
