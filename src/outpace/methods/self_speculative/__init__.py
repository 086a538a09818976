"""Methods in which the target drafts for itself, through a part of itself."""
