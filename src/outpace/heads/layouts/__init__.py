"""Heads in the layouts of the field: self-contained folders that other engines load, and that are read here."""
