"""Blockwise parallel decoding: everything that belongs to the method lies in this folder."""
