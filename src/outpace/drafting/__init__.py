"""What drafters share: the protocol, calibration, trees, copying, namespaces. No method is registered here."""
