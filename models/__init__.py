"""What the shipped models are, and the names that export knows."""
