"""Controllers: how much to draft, and when to stop."""
