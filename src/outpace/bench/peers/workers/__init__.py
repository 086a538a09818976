"""What runs in the workers' processes: ``serve.py`` and one file a library. They import nothing of outpace's bench."""
