"""Methods that draft with a trained head: one folder each, with its network, its loss and its drafter."""
