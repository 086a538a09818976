"""Other libraries and engines that outpace works inside of; one folder for each."""
