"""What each kind of gate learns, and from what. A file declares a kind (:mod:`outpace.training.gates.registry`)."""
