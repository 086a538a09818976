"""DDTree: everything that belongs to the method lies in this folder."""
