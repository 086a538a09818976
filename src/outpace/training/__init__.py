"""Training of learned drafters: data from the target itself, and one trainer for all kinds of heads."""
