"""Studies: a published claim beside what this machine and model show; one file a study (docs/studies.md)."""
