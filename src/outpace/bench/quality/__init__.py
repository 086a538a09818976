"""What a method's answers are worth: divergence from the target, and scores of tasks."""
