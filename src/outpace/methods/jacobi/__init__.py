"""Methods that iterate on guesses for the next tokens."""
