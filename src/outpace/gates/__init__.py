"""Gates: small classifiers that say which draft tokens the target is not asked about."""
