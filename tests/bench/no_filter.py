"""Stands in for the confined program on a system that confines nothing."""

import json
import os
import sys

task = json.load(sys.stdin)
os.write(task["report"], b"unconfined " + task["word"].encode())
raise SystemExit(97)
