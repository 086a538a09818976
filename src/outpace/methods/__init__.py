"""Methods: the registry, and one folder a family. A method is one file, a learned method one folder."""
